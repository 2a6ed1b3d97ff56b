#ifndef FA_TOOLS_FA_COMMAND_TREE_HPP_
#define FA_TOOLS_FA_COMMAND_TREE_HPP_

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace fa::cli {

/// An option as completions and the man page need it.
struct OptionFacts {
  std::vector<std::string> names;   ///< "-h", "--help"; of a positional argument its name alone
  std::string description;          ///< one line
  std::string group;                ///< heading in the help
  std::vector<std::string> values;  ///< those that it takes, if they are few; empty: any
  bool positional = false;
  bool takes_value = false;
  bool list = false;  ///< values are separated by commas
  bool required = false;
};

/// A command, or `fa` itself.
struct CommandFacts {
  std::string path;  ///< "fa cache list"
  std::string name;  ///< "list"
  std::string description;
  std::string footer;
  std::vector<OptionFacts> options;
  std::vector<CommandFacts> commands;
};

/// Everything that `app` can be asked.
CommandFacts facts_of(CLI::App& app);

/// A command and all below it, in the order of the help.
std::vector<const CommandFacts*> all_commands(const CommandFacts& root);

/// Scripts for the shells, and a page for man(1). All end with a line end.
std::string bash_completion(const CommandFacts& fa);
std::string zsh_completion(const CommandFacts& fa);
std::string fish_completion(const CommandFacts& fa);
std::string man_page(const CommandFacts& fa);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_COMMAND_TREE_HPP_
