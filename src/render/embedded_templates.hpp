#ifndef FA_SRC_RENDER_EMBEDDED_TEMPLATES_HPP_
#define FA_SRC_RENDER_EMBEDDED_TEMPLATES_HPP_

#include <span>

namespace fa::render {

struct EmbeddedTemplate {
  const char* name;  ///< relative to templates/
  const char* text;
};

/// templates/, sorted by name; written by the build.
std::span<const EmbeddedTemplate> embedded_templates();

}  // namespace fa::render

#endif  // FA_SRC_RENDER_EMBEDDED_TEMPLATES_HPP_
