#include "tune/record.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <fa/log.hpp>
#include <mutex>
#include <set>
#include <stdexcept>

#include "plan/backward.hpp"
#include "plan/planner.hpp"
#include "render/source.hpp"
#include "tune/bucket.hpp"
#include "tune/tuned_row.hpp"

namespace fa::tune {
namespace {

RecordKey make_key(const std::string& problem = "s_q=512 planned: sm90_forward") {
  return {"0123456789abcdef0123456789abcdef", "NVIDIA H200", 132, problem};
}

TEST(TuneRecord, SurvivesItsText) {
  const Record record{
      make_key(), {"kernel a", "of a"}, {{"kernel a", 0.91, 1.5}, {"kernel \"b\"", 1.0, 1.65, "it spills"}}};
  std::string problem;
  const std::optional<Record> read = read_record(write_record(record), &problem);
  ASSERT_TRUE(read) << problem;
  EXPECT_EQ(read->key, record.key);
  EXPECT_EQ(read->winner, (Winner{"kernel a", "of a"}));
  ASSERT_EQ(read->times.size(), 2U);
  EXPECT_DOUBLE_EQ(read->times[0].ratio, 0.91);
  EXPECT_DOUBLE_EQ(read->times[0].milliseconds, 1.5);
  EXPECT_EQ(read->times[1].kernel, "kernel \"b\"");
  EXPECT_EQ(read->times[1].refusal, "it spills");
}

TEST(TuneRecord, EveryTruncationIsRefusedWithAReason) {
  const std::string text = write_record({make_key(), {"kernel", "templates"}, {{"kernel", 1, 1}}});
  for (std::size_t size = 0; size + 2 < text.size(); ++size) {
    std::string problem;
    EXPECT_FALSE(read_record(text.substr(0, size), &problem)) << size;
    EXPECT_FALSE(problem.empty());
  }
  std::string problem;
  EXPECT_FALSE(read_record(R"({"schema": 99})", &problem));
  EXPECT_FALSE(read_record(R"({"schema": "1"})", &problem));
  EXPECT_FALSE(read_record("[]", &problem));
}

TEST(TuneRecord, NumbersAreTakenAsTheyStand) {
  const std::string text = write_record({make_key(), {"kernel", "templates"}, {{"kernel", 1, 1}}});
  const auto with = [&](const std::string& field, const std::string& number) {
    const std::size_t at = text.find("\"" + field + "\": ") + field.size() + 4;
    return text.substr(0, at) + number + text.substr(text.find(',', at));
  };
  std::string problem;
  EXPECT_TRUE(read_record(with("multiprocessors", "-2147483648"), &problem)) << problem;
  for (const char* number : {"1e300", "2147483648", "-2147483649", "18446744073709551615", "132.5", "null", "true"}) {
    problem.clear();
    EXPECT_FALSE(read_record(with("multiprocessors", number), &problem)) << number;
    EXPECT_NE(problem.find("multiprocessors"), std::string::npos) << problem;
    EXPECT_FALSE(read_record(with("schema", number), &problem)) << number;
  }
  EXPECT_FALSE(read_record(with("schema", "1.5"), &problem));
}

TEST(TuneRecord, HugeRatiosSurviveTheirText) {
  std::string problem;
  const auto read =
      read_record(write_record({make_key(), {"kernel", "templates"}, {{"kernel", 1e305, 1e308}}}), &problem);
  ASSERT_TRUE(read) << problem;
  EXPECT_EQ(read->times[0].ratio, 1e305);
  EXPECT_EQ(read->times[0].milliseconds, 1e308);
}

TEST(TuneRecord, EveryFieldOfTheKeyCounts) {
  std::set<std::string> digests{make_key().digest()};
  const auto differs = [&](void (*change)(RecordKey&)) {
    RecordKey key = make_key();
    change(key);
    EXPECT_TRUE(digests.insert(key.digest()).second);
  };
  differs([](RecordKey& key) { key.templates[0] ^= 1; });
  differs([](RecordKey& key) { key.gpu = "NVIDIA H100"; });
  differs([](RecordKey& key) { key.multiprocessors = 114; });
  differs([](RecordKey& key) { key.problem += "x"; });
  differs([](RecordKey& key) { key.method = "warm-l2/1"; });
  EXPECT_EQ(make_key().digest().size(), 32U);
}

Table make_table() {
  Table table{make_key().gpu, make_key().multiprocessors, kMethod, {}};
  table.rows = {{"problem b", {"kernel 2", "of 2"}, 0.9}, {"problem a", {"kernel 1", "of 1"}, 1.0}};
  return table;
}

TEST(TuneTable, FindsWhatWasMeasuredHere) {
  std::string problem;
  const std::optional<Table> table = read_table(write_table(make_table()), &problem);
  ASSERT_TRUE(table) << problem;
  const auto winner_of = [&](const RecordKey& key) {
    const Table::Row* row = table->find(key);
    return row != nullptr ? row->winner : Winner{};
  };
  EXPECT_EQ(winner_of(make_key("problem a")), (Winner{"kernel 1", "of 1"}));
  EXPECT_EQ(winner_of(make_key("problem b")), (Winner{"kernel 2", "of 2"}));
  EXPECT_EQ(winner_of(make_key("problem c")), Winner{});
  for (const auto change :
       {+[](RecordKey& key) { key.gpu = "NVIDIA H100"; }, +[](RecordKey& key) { key.multiprocessors = 78; },
        +[](RecordKey& key) { key.method = "other"; }}) {
    RecordKey key = make_key("problem a");
    change(key);
    EXPECT_EQ(winner_of(key), Winner{});
  }
}

TEST(TuneTable, WhatCannotBeReadIsPassedOverWithADebugMessage) {
  const std::string good = write_table(make_table());
  std::string old = good;
  old.replace(old.find(fmt::format("\"schema\": {}", kRecordSchema)), 11, "\"schema\": 1");
  const EmbeddedTable embedded[] = {{"old.json", old}, {"good.json", good}, {"broken.json", "{"}};
  std::vector<std::string> messages;
  set_log_level(LogLevel::debug);
  set_log_callback([&](LogLevel level, std::string_view message) {
    EXPECT_EQ(level, LogLevel::debug);
    messages.emplace_back(message);
  });
  const std::vector<Table> tables = readable_tables(embedded);
  set_log_callback({});
  set_log_level(LogLevel::warning);
  ASSERT_EQ(tables.size(), 1U);
  EXPECT_NE(tables[0].find(make_key("problem a")), nullptr);
  ASSERT_EQ(messages.size(), 2U);
  EXPECT_NE(messages[0].find("old.json is not used: it has another schema"), std::string::npos) << messages[0];
  EXPECT_NE(messages[1].find("broken.json"), std::string::npos);
}

/// The row that `fa tune` would write for a call of the planner's kernel.
Table::Row row_of(const plan::Problem& problem, bool backward) {
  const plan::KernelSpec planned =
      backward ? plan::plan_backward(problem, {}, false).main.front() : plan::plan_forward(problem, {}).kernel;
  return {bucket_text(problem, planned), {canonical(planned), "templates"}};
}

plan::Problem usual_problem() {
  plan::Problem problem;
  problem.arch = plan::parse_target("sm_90a");
  problem.d_qk = problem.d_v = 128;
  problem.b = 4;
  problem.h_q = problem.h_kv = 16;
  problem.s_q = problem.s_kv = 2048;
  return problem;
}

/// A table as it would be shipped now: a forward and a backward, with the digests of their templates.
Table current_table() {
  Table table{"NVIDIA H200", 132, kMethod, {}};
  for (const bool backward : {false, true}) {
    Table::Row row = row_of(usual_problem(), backward);
    std::string problem;
    const std::optional<TunedRow> meant = tuned_row(row, &problem);
    if (!meant) throw std::runtime_error(problem);
    row.winner.templates = render::templates_digest(render::unit_of(meant->kernel));
    table.rows.push_back(row);
  }
  return table;
}

/// Why calls would skip a table that the library carried, or a row of it; empty where they take every row. Nobody would
/// see more of it than a debug message.
std::string unused(std::string_view text) {
  std::string problem;
  const std::optional<Table> table = read_table(text, &problem);
  if (!table) return problem;
  if (table->rows.empty()) return "it has no rows";
  if (table->method != kMethod) return "it was measured otherwise: " + table->method;
  for (const Table::Row& row : table->rows) {
    const std::optional<TunedRow> meant = tuned_row(row, &problem);
    if (!meant) return row.problem + ": " + problem;
    if (render::templates_digest(render::unit_of(meant->kernel)) == row.winner.templates) continue;
    return row.winner.kernel +
           " was measured with other templates: `fa tune --carry` keeps it where its instructions are the same, "
           "`fa tune --force --output` measures anew";
  }
  return "";
}

TEST(TuneTable, EveryRowThatTheLibraryCarriesIsUsed) {
  EXPECT_EQ(shipped_tables().size(), embedded_tables().size());
  for (const EmbeddedTable& embedded : embedded_tables()) EXPECT_EQ(unused(embedded.text), "") << embedded.name;
}

/// What the test above says of tables, whether the library carries one or none.
TEST(TuneTable, WhatNoCallWouldTakeIsSeen) {
  const Table current = current_table();
  ASSERT_EQ(current.rows.size(), 2U);
  EXPECT_EQ(unused(write_table(current)), "");
  for (std::size_t row = 0; row < current.rows.size(); ++row) {
    Table stale = current;
    char& digit = stale.rows[row].winner.templates[0];
    digit = digit == '0' ? '1' : '0';
    const std::string reason = unused(write_table(stale));
    EXPECT_NE(reason.find(current.rows[row].winner.kernel + " was measured with other templates"), std::string::npos)
        << reason;
    Table unknown = current;
    unknown.rows[row].winner.kernel += "0";
    EXPECT_NE(unused(write_table(unknown)).find("no candidate any more"), std::string::npos);
  }
  Table other = current;
  other.method = "warm-l2/1";
  EXPECT_EQ(unused(write_table(other)), "it was measured otherwise: warm-l2/1");
  other = current;
  other.rows.clear();
  EXPECT_EQ(unused(write_table(other)), "it has no rows");
  EXPECT_NE(unused("{"), "");
}

TEST(TunedRow, IsAProblemOfItsBucketAndTheKernelItself) {
  int rows = 0;
  for (const char* arch : {"sm_80", "sm_89", "sm_90a", "sm_120a"}) {
    for (const bool backward : {false, true}) {
      for (const bool causal : {false, true}) {
        for (const int d : {64, 128, 256}) {
          plan::Problem problem;
          problem.arch = plan::parse_target(arch);
          problem.d_qk = problem.d_v = d;
          problem.causal = causal;
          problem.b = 4;
          problem.h_q = 16;
          problem.h_kv = 4;
          problem.s_q = problem.s_kv = 2048;
          const Table::Row row = row_of(problem, backward);
          std::string reason;
          const std::optional<TunedRow> meant = tuned_row(row, &reason);
          ASSERT_TRUE(meant) << row.problem << ": " << reason;
          EXPECT_EQ(canonical(meant->kernel), row.winner.kernel);
          EXPECT_EQ(meant->problem.b * meant->problem.h_q, 64);
          EXPECT_EQ(row_of(meant->problem, backward).problem, row.problem);
          ++rows;
        }
      }
    }
  }
  EXPECT_EQ(rows, 48);
}

TEST(TunedRow, SaysWhyNoCallTakesIt) {
  const Table::Row row = row_of(usual_problem(), false);
  const auto reason_for = [&](const std::string& before, const std::string& after, bool of_kernel) {
    Table::Row changed = row;
    std::string& text = of_kernel ? changed.winner.kernel : changed.problem;
    const std::size_t at = text.find(before);
    EXPECT_NE(at, std::string::npos) << before;
    text.replace(at, before.size(), after);
    std::string reason;
    EXPECT_FALSE(tuned_row(changed, &reason)) << changed.problem;
    return reason;
  };
  EXPECT_EQ(reason_for("stages=", "stages=7", true), "its kernel is no candidate any more");
  EXPECT_EQ(reason_for("stages=", "stages=7", false), "the planner chooses otherwise");
  EXPECT_EQ(reason_for("dtype=bf16", "dtype=f99", false), "its text is no bucket's");
  EXPECT_EQ(reason_for("heads=64", "heads=0", false), "its text is no bucket's");
  EXPECT_EQ(reason_for("heads=64", "heads=-64", false), "its text is no bucket's");
  EXPECT_EQ(reason_for("planned: ", "", false), "the planner chooses otherwise");
  EXPECT_NE(reason_for("arch=sm_90a", "arch=moon", false), "");
  std::string reason;
  EXPECT_FALSE(tuned_row({"", {"", ""}}, &reason));
  EXPECT_EQ(reason, "its text is no bucket's");
}

}  // namespace
}  // namespace fa::tune
