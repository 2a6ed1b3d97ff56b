#include "system.hpp"

#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <map>
#include <stdexcept>
#include <thread>

#include "child_programs.hpp"

namespace fa::cache::testing {
namespace {

std::map<std::string, ChildBody>& programs() {
  static std::map<std::string, ChildBody> registered;
  return registered;
}

}  // namespace

ChildProgram::ChildProgram(const char* name, ChildBody body) {
  programs().emplace(name, body);
}

int run_program(const std::string& name, const std::vector<std::string>& arguments) {
  try {
    return programs().at(name)(arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "child %s: %s\n", name.c_str(), error.what());
    return 99;
  }
}

int run_child_program(int argc, char** argv) {
  if (argc < 3 || std::string(argv[1]) != kChildOption) return -1;
  return run_program(argv[2], std::vector<std::string>(argv + 3, argv + argc));
}

bool have_links() {
  static const bool have = [] {
    const std::filesystem::path link = std::filesystem::temp_directory_path() / "fa_cache_link_probe";
    std::error_code error;
    std::filesystem::remove(link, error);
    std::filesystem::create_symlink("nothing", link, error);
    const bool made = !error;
    std::filesystem::remove(link, error);
    return made;
  }();
  return have;
}

void open_gate(const std::filesystem::path& gate) {
  std::ofstream(gate) << "open";
}

void wait_for_gate(const std::filesystem::path& gate) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point end = Clock::now() + std::chrono::seconds(100);
  while (!std::filesystem::exists(gate)) {
    if (Clock::now() > end) throw std::runtime_error("nobody opened " + gate.string());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace fa::cache::testing
