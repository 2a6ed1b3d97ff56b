#ifndef FA_CACHE_RECORDS_HPP_
#define FA_CACHE_RECORDS_HPP_

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fa::cache {

/// Small texts in the directory of a store, each published once: the first that is written under a name stays, so that
/// processes that publish different ones at the same time go on with the same.
///
///     <root>/tuned/<name>     one text a file
///     <root>/v2/tmp/          texts on their way in; what crashed writers leave there is removed by the store
///
/// Under the store's rules of ownership (cache/files.hpp). Thread-safe; no descriptor outlives a call; nothing throws
/// for what a file system does.
class Records {
 public:
  /// `root` is that of a store; empty: nothing is found and nothing can be published.
  explicit Records(std::filesystem::path root) : root_(std::move(root)) {}

  /// nullopt when there is none, or with the reason in `*problem` when it cannot be trusted.
  std::optional<std::string> read(const std::string& name, std::string* problem) const;

  /// What stands under `name` afterwards: `text`, or what another process published before; nullopt with the reason in
  /// `*problem` when the directory takes nothing.
  std::optional<std::string> publish(const std::string& name, std::string_view text, std::string* problem) const;

  /// Removes a text, such as one that nobody can read.
  void remove(const std::string& name) const;

  std::vector<std::string> names() const;

 private:
  std::filesystem::path root_;
};

}  // namespace fa::cache

#endif  // FA_CACHE_RECORDS_HPP_
