#ifndef FA_TOOLS_FA_COMMANDS_HPP_
#define FA_TOOLS_FA_COMMANDS_HPP_

namespace CLI {
class App;
}

namespace fa::cli {

/// What `fa` returns to the shell.
enum ExitCode : int { kSuccess = 0, kFailure = 1, kUsage = 2 };

// Each adds one subcommand, which sets `*exit_code` when it was the one asked for. Failures are thrown.
void add_info(CLI::App& app, int* exit_code);
void add_run(CLI::App& app, int* exit_code);
void add_render(CLI::App& app, int* exit_code);
void add_compile(CLI::App& app, int* exit_code);
void add_pack(CLI::App& app, int* exit_code);
void add_bench(CLI::App& app, int* exit_code);
void add_tune(CLI::App& app, int* exit_code);
void add_cache(CLI::App& app, int* exit_code);
void add_completion(CLI::App& app, int* exit_code);
void add_man(CLI::App& app, int* exit_code);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_COMMANDS_HPP_
