#include "command_tree.hpp"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <sstream>

#include "choice.hpp"

namespace fa::cli {
namespace {

std::string one_line(std::string text) {
  std::ranges::replace(text, '\n', ' ');
  return text;
}

/// What `offered` left at the option.
std::vector<std::string> values_of(CLI::Option& option) {
  std::vector<std::string> values;
  try {
    std::istringstream words(option.get_validator(0)->get_name());
    std::string word;
    if (!(words >> word) || word != kOffered) return {};
    while (words >> word) values.push_back(word);
  } catch (const CLI::OptionNotFound&) {
    return {};  // it has no validator
  }
  return values;
}

OptionFacts facts_of(CLI::Option& option) {
  OptionFacts facts;
  for (const std::string& name : option.get_snames()) facts.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) facts.names.push_back("--" + name);
  facts.positional = facts.names.empty();
  if (facts.positional) facts.names.push_back(option.get_name());
  facts.description = one_line(option.get_description());
  facts.group = option.get_group();
  facts.values = values_of(option);
  facts.takes_value = option.get_items_expected_max() > 0;
  facts.list = option.get_delimiter() != '\0';
  facts.required = option.get_required();
  return facts;
}

CommandFacts facts_of(CLI::App& app, const std::string& parents) {
  CommandFacts facts;
  facts.name = app.get_name();
  facts.path = parents + facts.name;
  facts.description = one_line(app.get_description());
  facts.footer = one_line(app.get_footer());
  for (CLI::Option* option : app.get_options([](CLI::Option*) { return true; })) {
    if (!option->get_group().empty()) facts.options.push_back(facts_of(*option));  // no group: it is hidden
  }
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; })) {
    facts.commands.push_back(facts_of(*command, facts.path + " "));
  }
  return facts;
}

void collect(const CommandFacts& command, std::vector<const CommandFacts*>* all) {
  all->push_back(&command);
  for (const CommandFacts& below : command.commands) collect(below, all);
}

}  // namespace

CommandFacts facts_of(CLI::App& app) {
  return facts_of(app, "");
}

std::vector<const CommandFacts*> all_commands(const CommandFacts& root) {
  std::vector<const CommandFacts*> all;
  collect(root, &all);
  return all;
}

}  // namespace fa::cli
