#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "choice.hpp"
#include "command_tree.hpp"
#include "commands.hpp"

namespace fa::cli {
namespace {

std::string replaced(std::string_view text, char from, std::string_view to) {
  std::string result;
  for (const char c : text) {
    if (c == from) {
      result += to;
    } else {
      result += c;
    }
  }
  return result;
}

/// In single quotes, as bash and zsh take it.
std::string shell_quoted(std::string_view text) {
  return "'" + replaced(text, '\'', "'\\''") + "'";
}

/// In single quotes, as fish takes it.
std::string fish_quoted(std::string_view text) {
  return "'" + replaced(replaced(text, '\\', "\\\\"), '\'', "\\'") + "'";
}

std::vector<std::string> names_of(const std::vector<CommandFacts>& commands) {
  std::vector<std::string> names;
  for (const CommandFacts& command : commands) names.push_back(command.name);
  return names;
}

std::vector<std::string> options_of(const CommandFacts& command) {
  std::vector<std::string> names;
  for (const OptionFacts& option : command.options) {
    if (!option.positional) names.insert(names.end(), option.names.begin(), option.names.end());
  }
  return names;
}

/// Values that stand in the place of a command's first argument.
std::vector<std::string> positional_values(const CommandFacts& command) {
  for (const OptionFacts& option : command.options) {
    if (option.positional) return option.values;
  }
  return {};
}

constexpr std::string_view kBashHead = R"(# Completions of fa for bash, made by `fa completion bash`.

_fa() {
  local current=${COMP_WORDS[COMP_CWORD]} option='' path=fa i
  ((COMP_CWORD == 0)) || option=${COMP_WORDS[COMP_CWORD - 1]}
  if [[ $current == '=' ]]; then
    current=''
  elif [[ $option == '=' ]]; then
    option=${COMP_WORDS[COMP_CWORD - 2]}
  fi
  for ((i = 1; i < COMP_CWORD; ++i)); do
    case "$path ${COMP_WORDS[i]}" in
)";

constexpr std::string_view kBashTail = R"(  esac
  COMPREPLY=()
  if [[ $takes == list ]]; then
    local before=''
    [[ $current != *,* ]] || before=${current%,*},
    mapfile -t COMPREPLY < <(compgen -P "$before" -W "$values" -- "${current##*,}")
  elif [[ $takes == value ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$values" -- "$current")
  elif [[ $takes == any ]]; then
    compopt -o default 2>/dev/null
  elif [[ $current == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$options" -- "$current")
  elif [[ -n $words ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
  else
    compopt -o default 2>/dev/null
  fi
}
complete -F _fa fa
)";

constexpr std::string_view kFishPath = R"(        set path "$path $word"
    end
  end
  test "$path" = "$argv"
end

)";

std::string zsh_text(std::string_view text) {
  return replaced(replaced(replaced(replaced(text, '\\', "\\\\"), '[', "\\["), ']', "\\]"), ':', "\\:");
}

/// What completes a value.
std::string zsh_action(const OptionFacts& option) {
  if (option.values.empty()) return "_files";
  const std::string values = fmt::format("{}", fmt::join(option.values, " "));
  return option.list ? "_sequence compadd - " + values : "(" + values + ")";
}

std::string zsh_argument(const OptionFacts& option) {
  if (option.positional) return shell_quoted(fmt::format("*:{}:{}", option.names.front(), zsh_action(option)));
  std::string result;
  for (const std::string& name : option.names) {
    if (!result.empty()) result += " \\\n    ";
    const std::string value = option.takes_value ? ":value:" + zsh_action(option) : "";
    result += shell_quoted(
        fmt::format("({}){}[{}]{}", fmt::join(option.names, " "), name, zsh_text(option.description), value));
  }
  return result;
}

/// "_fa_cache_list"
std::string zsh_function(const CommandFacts& command) {
  return "_" + replaced(command.path, ' ', "_");
}

std::string zsh_body(const CommandFacts& command) {
  std::string body = zsh_function(command) + "() {\n";
  const bool nested = !command.commands.empty();
  if (nested) body += "  local state line\n  local -a commands\n";
  body += nested ? "  _arguments -C" : "  _arguments";
  for (const OptionFacts& option : command.options) body += " \\\n    " + zsh_argument(option);
  if (!nested) return body + "\n}\n\n";
  body += " \\\n    '1: :->command' \\\n    '*:: :->rest'\n  case $state in\n    command)\n      commands=(\n";
  for (const CommandFacts& below : command.commands) {
    body += fmt::format("        {}\n", shell_quoted(below.name + ":" + zsh_text(below.description)));
  }
  body += "      )\n      _describe command commands\n      ;;\n    rest)\n      case $line[1] in\n";
  for (const CommandFacts& below : command.commands) {
    body += fmt::format("        {}) {} ;;\n", below.name, zsh_function(below));
  }
  return body + "      esac\n      ;;\n  esac\n}\n\n";
}

std::string fish_option(const CommandFacts& command, const OptionFacts& option) {
  std::string line = fmt::format("complete -c fa -n '__fa_at {}'", command.path);
  for (const std::string& name : option.names) {
    if (option.positional) continue;
    line += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
  }
  const std::string values = fmt::format("{}", fmt::join(option.values, " "));
  if (option.takes_value)
    line += values.empty() ? " -r"
            : option.list  ? " -x -a '(__fish_append , " + values + ")'"
                           : " -x -a '" + values + "'";
  return line + " -d " + fish_quoted(option.description) + "\n";
}

}  // namespace

std::string bash_completion(const CommandFacts& fa) {
  const std::vector<const CommandFacts*> all = all_commands(fa);
  std::string script(kBashHead);
  for (const CommandFacts* command : all) {
    if (command != &fa)
      script += fmt::format("      {}) path+=\" ${{COMP_WORDS[i]}}\" ;;\n", shell_quoted(command->path));
  }
  script += "    esac\n  done\n  local options='' words='' values='' takes=''\n  case \"$path\" in\n";
  for (const CommandFacts* command : all) {
    std::vector<std::string> words = names_of(command->commands);
    if (words.empty()) words = positional_values(*command);
    script += fmt::format("    {})\n      options={}\n      words={}\n      ;;\n", shell_quoted(command->path),
                          shell_quoted(fmt::format("{}", fmt::join(options_of(*command), " "))),
                          shell_quoted(fmt::format("{}", fmt::join(words, " "))));
  }
  script += "  esac\n  case \"$path $option\" in\n";
  for (const CommandFacts* command : all) {
    for (const OptionFacts& option : command->options) {
      if (option.positional || !option.takes_value) continue;
      std::string patterns;
      for (const std::string& name : option.names) {
        patterns += (patterns.empty() ? "" : " | ") + shell_quoted(command->path + " " + name);
      }
      script += fmt::format("    {}) takes={} values={} ;;\n", patterns,
                            option.values.empty() ? "any"
                            : option.list         ? "list"
                                                  : "value",
                            shell_quoted(fmt::format("{}", fmt::join(option.values, " "))));
    }
  }
  return script + std::string(kBashTail);
}

std::string zsh_completion(const CommandFacts& fa) {
  std::string script = "#compdef fa\n# Completions of fa for zsh, made by `fa completion zsh`.\n\n";
  for (const CommandFacts* command : all_commands(fa)) script += zsh_body(*command);
  return script + "if [[ $zsh_eval_context[-1] == loadautofunc ]]; then\n  _fa \"$@\"\nelse\n  compdef _fa fa\nfi\n";
}

std::string fish_completion(const CommandFacts& fa) {
  const std::vector<const CommandFacts*> all = all_commands(fa);
  std::string script =
      "# Completions of fa for fish, made by `fa completion fish`.\n\n"
      "# Whether the command that is being written is the one given.\n"
      "function __fa_at\n  set -l path fa\n  for word in (commandline -opc)[2..-1]\n    if contains -- \"$path $word\"";
  for (const CommandFacts* command : all) {
    if (command != &fa) script += " " + fish_quoted(command->path);
  }
  script += "\n" + std::string(kFishPath);
  for (const CommandFacts* command : all) {
    for (const CommandFacts& below : command->commands) {
      script += fmt::format("complete -c fa -n '__fa_at {}' -f -a {} -d {}\n", command->path, below.name,
                            fish_quoted(below.description));
    }
    for (const OptionFacts& option : command->options) {
      if (!option.positional || !option.values.empty()) script += fish_option(*command, option);
    }
  }
  return script;
}

void add_completion(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand("completion", "Print the completions of fa for a shell");
  command->footer("For bash: source <(fa completion bash)");
  const Choices<std::string (*)(const CommandFacts&)> shells{
      {"bash", bash_completion}, {"zsh", zsh_completion}, {"fish", fish_completion}};
  const auto script = std::make_shared<std::string (*)(const CommandFacts&)>();
  add_choice(*command, "shell", script.get(), shells, "The shell")->required();
  command->callback([&app, script, exit_code] {
    fmt::print("{}", (*script)(facts_of(app)));
    *exit_code = kSuccess;
  });
}

}  // namespace fa::cli
