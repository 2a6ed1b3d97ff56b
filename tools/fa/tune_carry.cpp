#include "tune_carry.hpp"

#include <fmt/format.h>

#include <cstddef>
#include <cstdio>
#include <fstream>
#include <map>
#include <mutex>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <fa/error.hpp>

#include "cache/files.hpp"
#include "commands.hpp"
#include "compile/compiler.hpp"
#include "output.hpp"
#include "parallel.hpp"
#include "render/templates.hpp"
#include "support/text.hpp"
#include "terminal.hpp"
#include "tune/tuned_row.hpp"

namespace fa::cli {
namespace {

tune::Table read_table_file(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  std::ostringstream text;
  if (stream) text << stream.rdbuf();
  if (!stream) throw Error(ErrorCode::io, fmt::format("{} cannot be read", file), {{"argument", "--table"}});
  std::string problem;
  std::optional<tune::Table> table = tune::read_table(text.str(), &problem);
  if (!table) throw Error(ErrorCode::invalid_argument, fmt::format("{} is no table: {}", file, problem));
  return std::move(*table);
}

/// A kernel that rows of the table name, and what became of it.
struct Carried {
  plan::KernelSpec spec;
  std::string measured;  ///< digest of the templates that the row names
  std::string problem = {};
};

/// Why the instructions of `kernel` are others than they were with the templates `from`; empty if they are not.
std::string changed(const Carried& kernel, const render::TemplateSet& from) {
  const std::string unit = render::unit_of(kernel.spec);
  const std::string& before = from.included_by(unit).digest;
  if (kernel.measured == render::templates_digest(unit)) return {};
  if (kernel.measured != before) {
    return fmt::format("measured with templates {}, those of --carry are {}", kernel.measured, before);
  }
  std::vector<compile::Cubin> cubins;
  for (const render::TemplateSet* set : {&from, &render::templates()}) {
    try {
      cubins.push_back(compile::compile(render::render(kernel.spec, *set), kernel.spec.arch));
    } catch (const Error& error) {
      return fmt::format("with {} templates {}", set == &from ? "the old" : "today's", error.what());
    }
  }
  if (cubins[0].facts.local_bytes != cubins[1].facts.local_bytes) return "it spills other registers";
  return compile::instruction_difference(cubins[0].bytes, cubins[1].bytes);
}

/// The kernels that the rows name, each once; rows that this version has no use for are told and left out.
std::vector<Carried> kernels_of(tune::Table* table) {
  std::vector<Carried> kernels;
  std::map<std::pair<std::string, std::string>, bool> known;
  std::vector<tune::Table::Row> rows;
  for (const tune::Table::Row& row : table->rows) {
    std::string reason;
    const std::optional<tune::TunedRow> meant = tune::tuned_row(row, &reason);
    if (!meant) {
      fmt::print("left out  {}\n          {}\n", row.problem, reason);
      continue;
    }
    rows.push_back(row);
    if (known.emplace(std::pair(row.winner.kernel, row.winner.templates), true).second) {
      kernels.push_back({meant->kernel, row.winner.templates});
    }
  }
  table->rows = std::move(rows);
  return kernels;
}

void compare(const CarryOptions& options, const render::TemplateSet& from, std::vector<Carried>* kernels) {
  std::mutex mutex;
  std::size_t done = 0;
  parallel_for(kernels->size(), options.jobs, [&](std::size_t i) {
    Carried& kernel = (*kernels)[i];
    try {
      kernel.problem = changed(kernel, from);
    } catch (const std::exception& error) {
      kernel.problem = error.what();
    }
    const std::scoped_lock lock(mutex);
    clear_progress();
    fmt::print("{}  {}\n", kernel.problem.empty() ? "the same " : "left out ", canonical(kernel.spec));
    if (!kernel.problem.empty()) fmt::print("          {}\n", kernel.problem);
    show_progress(fmt::format("{} of {}", ++done, kernels->size()));
  });
  clear_progress();
}

}  // namespace

int carry_table(const CarryOptions& options) {
  const std::string output = options.output.empty() ? options.table : options.output;
  check_output(output, {}, false);
  const render::TemplateSet from = render::read_templates(options.from, "--carry");
  tune::Table table = read_table_file(options.table);
  const std::size_t all = table.rows.size();
  std::vector<Carried> kernels = kernels_of(&table);
  compare(options, from, &kernels);
  std::vector<tune::Table::Row> rows;
  for (tune::Table::Row& row : table.rows) {
    for (const Carried& kernel : kernels) {
      if (!kernel.problem.empty() || canonical(kernel.spec) != row.winner.kernel ||
          kernel.measured != row.winner.templates) {
        continue;
      }
      row.winner.templates = render::templates_digest(render::unit_of(kernel.spec));
      rows.push_back(row);
      break;
    }
  }
  table.rows = std::move(rows);
  fmt::print("{}: {} of {} rows\n", output, table.rows.size(), all);
  const std::string text = tune::write_table(table);
  std::string problem;
  if (!cache::write_shared_file(output, std::as_bytes(std::span(text)), &problem)) {
    throw Error(ErrorCode::io, fmt::format("{} cannot be written: {}", output, problem));
  }
  return kSuccess;
}

}  // namespace fa::cli
