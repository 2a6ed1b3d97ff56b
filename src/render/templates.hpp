#ifndef FA_SRC_RENDER_TEMPLATES_HPP_
#define FA_SRC_RENDER_TEMPLATES_HPP_

#include <vector>

#include "render/source.hpp"

namespace fa::render {

/// The template headers in use, sorted by name: the embedded ones, or *.cuh under FA_TEMPLATE_DIR, which is read once.
/// Throws fa::Error(io) when that directory cannot be read.
const std::vector<Header>& templates();

}  // namespace fa::render

#endif  // FA_SRC_RENDER_TEMPLATES_HPP_
