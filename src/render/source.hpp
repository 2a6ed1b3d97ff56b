#ifndef FA_SRC_RENDER_SOURCE_HPP_
#define FA_SRC_RENDER_SOURCE_HPP_

#include <string>
#include <string_view>
#include <vector>

#include "plan/kernel_spec.hpp"

namespace fa::render {

/// A template header by the name it is included under ("common/softmax.cuh").
struct Header {
  std::string name;
  std::string text;
};

/// One translation unit and the template headers that it includes, directly or through others.
struct Source {
  std::string kernel_name;  ///< extern "C" entry point
  std::string unit;         ///< the rendered text
  std::vector<Header> headers;
  std::string target = {};  ///< "sm_90a"
  int first_nvrtc = 0;      ///< plan::Kernel::first_nvrtc
  bool fuses = true;        ///< the compiler may fuse a product and a sum, which is rounded once then
};

class TemplateSet;

/// Renders `spec`: equal specs give equal bytes. Without `from`, with the templates in use.
Source render(const plan::KernelSpec& spec);
Source render(const plan::KernelSpec& spec, const TemplateSet& from);

/// `render(spec).unit`, for who only wants to know which source it is.
std::string unit_of(const plan::KernelSpec& spec);

/// The unit with its includes pasted in, each once, behind a comment that says how nvcc compiles it: what `fa render`
/// prints.
std::string flatten(const Source& source);

/// Digest (XXH3-128, 32 hex digits) of all templates in use: the embedded ones, or those under FA_TEMPLATE_DIR.
const std::string& templates_digest();

/// Of those alone that `unit` includes, directly or through others: what a kernel depends on.
const std::string& templates_digest(std::string_view unit);

}  // namespace fa::render

#endif  // FA_SRC_RENDER_SOURCE_HPP_
