#ifndef FA_SRC_RENDER_TEMPLATES_HPP_
#define FA_SRC_RENDER_TEMPLATES_HPP_

#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "render/source.hpp"

namespace fa::render {

/// The template headers of one place. Threads may share it.
class TemplateSet {
 public:
  explicit TemplateSet(std::vector<Header> headers);

  /// Sorted by name.
  const std::vector<Header>& headers() const noexcept { return headers_; }

  /// XXH3-128 of all of them, 32 hex digits.
  const std::string& digest() const noexcept { return digest_; }

  /// What a unit may include, directly or through others.
  struct Included {
    std::vector<const Header*> headers;  ///< sorted by name
    std::string digest;                  ///< of these alone
  };

  /// An #include counts wherever it stands, behind an #if or in a comment too: what a Config leaves out today it may
  /// want tomorrow. The compiler gets no other headers, so that one which is overlooked here is an error there.
  const Included& included_by(std::string_view unit) const;

 private:
  const Header* find(std::string_view name) const noexcept;
  void add_included(std::string_view text, std::map<std::string_view, const Header*>* found) const;

  std::vector<Header> headers_;
  std::string digest_;
  mutable std::mutex mutex_;
  mutable std::map<std::string, Included, std::less<>> known_;  ///< by the names that units include themselves
};

/// *.cuh under `directory`. Throws fa::Error(io), which names `argument`, when it cannot be read.
TemplateSet read_templates(const std::filesystem::path& directory, std::string_view argument);

/// The templates in use: the embedded ones, or those under FA_TEMPLATE_DIR, which is read once.
const TemplateSet& templates();

}  // namespace fa::render

#endif  // FA_SRC_RENDER_TEMPLATES_HPP_
