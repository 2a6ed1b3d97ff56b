#include "api/recording.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include <fa/version.h>
#include <fa/error.hpp>

#include "plan/parse_spec.hpp"
#include "support/log.hpp"
#include "support/platform.hpp"
#include "support/text.hpp"

namespace fa::api {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kSchema = 1;

std::string line_of(std::span<const plan::KernelSpec> specs) {
  Json kernels = Json::array();
  for (const plan::KernelSpec& spec : specs) kernels.push_back(canonical(spec));
  return Json{{"schema", kSchema}, {"fa", FA_VERSION_STRING}, {"kernels", std::move(kernels)}}.dump() + "\n";
}

plan::Alternatives read_line(const std::string& line) {
  const Json json = Json::parse(line);
  if (json.at("schema") != kSchema)
    support::throw_invalid("schema", json.at("schema").dump(), fmt::format("{}", kSchema));
  plan::Alternatives specs;
  for (const Json& kernel : json.at("kernels")) specs.push_back(plan::parse_spec(kernel.get<std::string>()));
  if (specs.empty()) support::throw_invalid("kernels", "nothing", "one or more");
  return specs;
}

}  // namespace

void record_request(std::span<const plan::KernelSpec> specs) {
  const std::string file = support::environment("FA_RECORD");
  if (file.empty() || specs.empty()) return;
  static std::mutex mutex;
  static std::set<std::string> recorded;  // by file
  static bool warned = false;
  const std::string line = line_of(specs);
  const std::scoped_lock lock(mutex);
  if (!recorded.insert(file + '\n' + line).second || support::platform::append_line(file, line) || warned) return;
  warned = true;
  support::logf(LogLevel::warning, "FA_RECORD = {}: what is asked for cannot be recorded there: {}", file,
                std::strerror(errno));
}

std::vector<plan::Alternatives> read_recording(const std::filesystem::path& file) {
  std::ifstream stream(file);
  std::vector<plan::Alternatives> requests;
  std::string line;
  for (int number = 1; std::getline(stream, line); ++number) {
    if (line.empty()) continue;
    try {
      plan::Alternatives specs = read_line(line);
      if (std::ranges::find(requests, specs) == requests.end()) requests.push_back(std::move(specs));
    } catch (const std::exception& error) {  // Error, or what the parser says
      throw Error(
          ErrorCode::invalid_argument,
          fmt::format("{}:{}: no request that this version of fa recorded: {}", file.string(), number, error.what()),
          {{"argument", "record"}, {"value", fmt::format("{}:{}", file.string(), number)}});
    }
  }
  if (!stream.eof()) {
    throw Error(ErrorCode::io, fmt::format("{} cannot be read", file.string()),
                {{"argument", "record"}, {"value", file.string()}});
  }
  return requests;
}

}  // namespace fa::api
