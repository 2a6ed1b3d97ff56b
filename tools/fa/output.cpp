#include "output.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <optional>
#include <system_error>

#include <fa/error.hpp>

#include "cache/files.hpp"
#include "support/text.hpp"

namespace fa::cli {

void check_output(const std::string& output, const std::vector<std::string>& inputs, bool force) {
  std::string problem;
  const std::optional<cache::Destination> destination = cache::find_destination(output, &problem);
  if (!destination) {
    throw Error(ErrorCode::io, fmt::format("{} cannot be written: {}", output, problem),
                {{"argument", "output"}, {"value", output}});
  }
  for (const std::string& input : inputs) {
    std::error_code ignored;  // what is not there is no input either
    if (!force && std::filesystem::equivalent(output, input, ignored)) {
      support::throw_invalid("output", output, "another file than the input, or --force, which replaces it");
    }
  }
}

}  // namespace fa::cli
