#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <array>
#include <string>
#include <string_view>

#include <fa/version.h>

#include "command_tree.hpp"
#include "commands.hpp"

namespace fa::cli {
namespace {

struct Variable {
  std::string_view name;
  std::string_view meaning;
};

/// The table of docs/cli.md, for whoever reads a terminal.
constexpr std::array kVariables{
    Variable{"FA_CACHE_DIR", "Directory of compiled kernels; default $XDG_CACHE_HOME/fa, else ~/.cache/fa."},
    Variable{"FA_CACHE_PACKS", "Files made by fa pack, separated by colons, searched before the directory."},
    Variable{"FA_CACHE_MAX_BYTES", "Cap of the directory in bytes; default 256M, negative: none."},
    Variable{"FA_CACHE_MAX_ENTRIES", "Cap of the directory in kernels; default 4096, negative: none."},
    Variable{"FA_CACHE_COMPILERS", "NVRTC versions whose kernels are accepted: any (default), 13.0, >=12.8."},
    Variable{"FA_TUNE", "off, cached or on: overrides what a program asks of the tuner."},
    Variable{"FA_LOG", "debug, info, warning (default), error or off."},
    Variable{"FA_NVRTC_PATH", "NVRTC's file or directory, where the usual places do not have it."},
    Variable{"FA_DEBUG_KERNELS", "1: kernels that check addresses, and stop where a wait does not end."},
    Variable{"FA_RECORD", "File that the kernels are appended to that a program asks for; fa pack --record reads it."},
    Variable{"FA_TEMPLATE_DIR", "Kernel templates to use instead of the embedded ones."},
    Variable{"FA_KEEP_SOURCE", "Directory that keeps the source of a kernel that NVRTC refused."},
};

/// As roff takes it: nothing in it is a request or an escape.
std::string roff(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == '\\') {
      result += "\\e";
    } else if (c == '-') {
      result += "\\-";
    } else {
      result += c;
    }
  }
  if (result.starts_with(".") || result.starts_with("'")) result.insert(0, "\\&");
  return result;
}

std::string option_item(const OptionFacts& option) {
  std::string names;
  for (const std::string& name : option.names) {
    names += names.empty() ? "" : ", ";
    names += (option.positional ? "\\fI" : "\\fB") + roff(name) + "\\fR";
  }
  if (option.takes_value && !option.positional) names += " \\fIVALUE\\fR";
  std::string text = roff(option.description);
  if (option.required) text += " (required)";
  return fmt::format(".TP\n{}\n{}\n", names, text);
}

std::string synopsis(const CommandFacts& command) {
  std::string line = "\\fB" + roff(command.path) + "\\fR";
  if (!command.commands.empty()) return line + " \\fICOMMAND\\fR ...";
  for (const OptionFacts& option : command.options) {
    if (option.positional)
      line +=
          (option.required ? " \\fI" : " [\\fI") + roff(option.names.front()) + (option.required ? "\\fR" : "\\fR]");
  }
  return line + " [\\fIOPTIONS\\fR]";
}

std::string section(const CommandFacts& command) {
  std::string text =
      fmt::format(".SS {}\n{}\n.PP\n{}.\n", roff(command.path), synopsis(command), roff(command.description));
  for (const OptionFacts& option : command.options) text += option_item(option);
  if (!command.footer.empty()) text += ".PP\n" + roff(command.footer) + "\n";
  return text;
}

}  // namespace

std::string man_page(const CommandFacts& fa) {
  std::string page = fmt::format(".TH FA 1 \"\" \"fa {}\" \"User Commands\"\n", FA_VERSION_STRING);
  page += ".SH NAME\nfa \\- attention kernels, compiled, cached, tuned and run\n.SH SYNOPSIS\n";
  for (const CommandFacts& command : fa.commands) page += synopsis(command) + "\n.br\n";
  page += ".SH DESCRIPTION\n" + roff(fa.description) + ".\n.SH OPTIONS\n";
  for (const OptionFacts& option : fa.options) page += option_item(option);
  page += ".SH COMMANDS\n";
  for (const CommandFacts* command : all_commands(fa)) {
    if (command != &fa) page += section(*command);
  }
  page += ".SH ENVIRONMENT\n";
  for (const Variable& variable : kVariables) {
    page += fmt::format(".TP\n\\fB{}\\fR\n{}\n", variable.name, roff(variable.meaning));
  }
  page +=
      ".SH EXIT STATUS\n.TP\n\\fB0\\fR\nsuccess\n.TP\n\\fB1\\fR\nit failed; standard error says why\n"
      ".TP\n\\fB2\\fR\nthe command line is wrong\n";
  return page;
}

void add_man(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand("man", "Print the man page of fa");
  command->footer("To read it: fa man | man -l -");
  command->callback([&app, exit_code] {
    fmt::print("{}", man_page(facts_of(app)));
    *exit_code = kSuccess;
  });
}

}  // namespace fa::cli
