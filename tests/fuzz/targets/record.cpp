#include "tune/record.hpp"

#include <array>
#include <optional>
#include <string_view>

#include "fuzz/targets/target.hpp"

namespace fa::fuzz {
namespace {

void read_record(std::string_view text) {
  std::string problem;
  const std::optional<tune::Record> record = tune::read_record(text, &problem);
  require(record.has_value() == problem.empty(), "a record, or a reason");
  if (!record) return;
  require(record->key.digest().size() == 32, "a digest");
  const std::string written = tune::write_record(*record);
  const std::optional<tune::Record> again = tune::read_record(written, &problem);
  require(again.has_value(), "a record that was written is read");
  require(again->key == record->key && again->winner == record->winner, "a record is read as it was written");
  require(tune::write_record(*again) == written, "a record is written as it was read");
}

void read_table(std::string_view text) {
  std::string problem;
  const std::optional<tune::Table> table = tune::read_table(text, &problem);
  require(table.has_value() == problem.empty(), "a table, or a reason");
  if (!table) return;
  for (const tune::Table::Row& row : table->rows) {
    const tune::RecordKey key{"templates", table->gpu, table->multiprocessors, row.problem, table->method};
    const tune::Table::Row* found = table->find(key);
    require(found != nullptr && found->problem == row.problem, "a row is found");
  }
  const std::string written = tune::write_table(*table);
  const std::optional<tune::Table> again = tune::read_table(written, &problem);
  require(again.has_value() && again->rows.size() == table->rows.size(), "a table that was written is read");
  const std::array embedded{tune::EmbeddedTable{"fuzz", text}};
  require(tune::readable_tables(embedded).size() == 1, "a table is readable twice");
}

}  // namespace

std::vector<std::string> seeds() {
  tune::Record record{{"templates", "NVIDIA H200", 132, "forward dtype=bf16"}, {"kernel", "templates"}, {}};
  record.times.push_back({"kernel", 0.97, 1.25});
  record.times.push_back({"other", 0, 0, "it spills"});
  tune::Table table;
  table.gpu = "NVIDIA H200";
  table.multiprocessors = 132;
  table.rows = {{"forward dtype=f16", {"kernel", "templates"}, 0.95},
                {"forward dtype=bf16", {"other", "templates"}, 1}};
  record.times.push_back({"kernel", 1e305, 1e308});
  return {tune::write_record(record), tune::write_table(table), R"({"schema": 1e300, "rows": [], "times": []})"};
}

}  // namespace fa::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  fa::fuzz::read_record(text);
  fa::fuzz::read_table(text);
  return 0;
}
