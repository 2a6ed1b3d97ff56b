#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "commands.hpp"
#include "support/log.hpp"
#include "terminal.hpp"

namespace {

/// What the compiler said belongs to the message of a failed compilation.
void print_error(const fa::Error& error) {
  fa::cli::print_failure(error.what());
  const std::string log(error.field("log"));
  if (!log.empty()) {
    std::fprintf(stderr, "%s\n", log.c_str());
  }
}

/// The first word where a command is due that is none, with what would be; empty where there is no such word.
std::string unknown_command(CLI::App& app, int argc, char** argv) {
  CLI::App* level = &app;
  for (int i = 1; i < argc && level->get_require_subcommand_min() > 0; ++i) {
    const std::string word = argv[i];
    if (word.starts_with("-")) continue;
    const std::vector<CLI::App*> known = level->get_subcommands([](const CLI::App*) { return true; });
    const auto next = std::ranges::find(known, word, [](const CLI::App* command) { return command->get_name(); });
    if (next == known.end()) {
      std::string accepted;
      for (const CLI::App* command : known) {
        accepted.append(accepted.empty() ? "" : ", ").append(command->get_name());
      }
      return fmt::format("'{}' is no command of `{}`: accepted is {}", word, level->get_name(), accepted);
    }
    level = *next;
  }
  return {};
}

int parse_and_run(CLI::App& app, int argc, char** argv, const int& exit_code) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::RequiredError& error) {
    const std::string unknown = unknown_command(app, argc, argv);
    if (unknown.empty()) return app.exit(error) == 0 ? fa::cli::kSuccess : fa::cli::kUsage;
    fa::cli::print_failure(unknown);
    return fa::cli::kUsage;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? fa::cli::kSuccess : fa::cli::kUsage;
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    fa::cli::print_failure("standard output could not be written");
    return fa::cli::kFailure;
  }
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    CLI::App app{"fa: exact attention by kernels that are rendered, compiled and cached at run time", "fa"};
    app.set_version_flag("--version", std::string("fa ") + fa::version());
    app.allow_windows_style_options(false);  // /a/b is a path on every system
    app.require_subcommand(1);
    int exit_code = fa::cli::kSuccess;
    fa::support::log_enabled(fa::LogLevel::warning);  // an unknown FA_LOG is told before all else
    fa::cli::add_info(app, &exit_code);
    fa::cli::add_run(app, &exit_code);
    fa::cli::add_render(app, &exit_code);
    fa::cli::add_compile(app, &exit_code);
    fa::cli::add_pack(app, &exit_code);
    fa::cli::add_bench(app, &exit_code);
    fa::cli::add_tune(app, &exit_code);
    fa::cli::add_cache(app, &exit_code);
    fa::cli::add_completion(app, &exit_code);
    fa::cli::add_man(app, &exit_code);
    return parse_and_run(app, argc, argv, exit_code);
  } catch (const fa::Error& error) {
    print_error(error);
  } catch (const std::exception& exception) {
    fa::cli::print_failure(exception.what());
  }
  return fa::cli::kFailure;
}
