#ifndef FA_TOOLS_FA_TERMINAL_HPP_
#define FA_TOOLS_FA_TERMINAL_HPP_

#include <nlohmann/json.hpp>

#include <string>
#include <string_view>

namespace fa::cli {

/// "fa: MESSAGE" on standard error; of control characters line ends and tabs pass.
void print_failure(std::string_view message);

/// `text` with control characters and what is not UTF-8 as "\\x1b": for what files say, which may be anything.
std::string printable(std::string_view text);

/// One line on standard error that the next one replaces; nothing when standard error is no terminal.
void show_progress(const std::string& line);
void clear_progress();

/// Pretty-printed on standard output. Numbers that JSON does not have become null.
void print_json(const nlohmann::json& value);

/// "1.5 MiB".
std::string format_bytes(double bytes);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_TERMINAL_HPP_
