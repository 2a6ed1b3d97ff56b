// Runs the snippets of the pages on the host device. That they compile is most of the test.

#include <cstdio>
#include <exception>

#include "snippet.hpp"

extern "C" int run_c_snippets(void);

namespace fa_docs {

std::vector<std::pair<std::string, Make>>& snippets() {
  static std::vector<std::pair<std::string, Make>> all;
  return all;
}

namespace {

/// Whether it ran, and left a configuration that is accepted.
bool passes(const std::string& place, const Make& make) {
  try {
    const std::unique_ptr<Snippet> snippet = make();
    snippet->run();
    fa::Attention::create(snippet->config, fa::Device::host());
    return true;
  } catch (const std::exception& exception) {
    std::printf("FAILED: %s: %s\n", place.c_str(), exception.what());
    return false;
  }
}

}  // namespace
}  // namespace fa_docs

int main() {
  int failures = run_c_snippets();
  for (const auto& [place, make] : fa_docs::snippets()) failures += fa_docs::passes(place, make) ? 0 : 1;
  std::printf("%zu C++ snippets, %d failures\n", fa_docs::snippets().size(), failures);
  return failures == 0 && !fa_docs::snippets().empty() ? 0 : 1;
}
