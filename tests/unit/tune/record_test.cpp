#include "tune/record.hpp"

#include <gtest/gtest.h>

#include <fa/log.hpp>
#include <mutex>
#include <set>

#include "render/source.hpp"

namespace fa::tune {
namespace {

RecordKey make_key(const std::string& problem = "s_q=512 planned: sm90_forward") {
  return {"0123456789abcdef0123456789abcdef", "NVIDIA H200", 132, problem};
}

TEST(TuneRecord, SurvivesItsText) {
  const Record record{make_key(), "kernel a", {{"kernel a", 0.91, 1.5}, {"kernel \"b\"", 1.0, 1.65, "it spills"}}};
  std::string problem;
  const std::optional<Record> read = read_record(write_record(record), &problem);
  ASSERT_TRUE(read) << problem;
  EXPECT_EQ(read->key, record.key);
  EXPECT_EQ(read->kernel, "kernel a");
  ASSERT_EQ(read->times.size(), 2U);
  EXPECT_DOUBLE_EQ(read->times[0].ratio, 0.91);
  EXPECT_DOUBLE_EQ(read->times[0].milliseconds, 1.5);
  EXPECT_EQ(read->times[1].kernel, "kernel \"b\"");
  EXPECT_EQ(read->times[1].refusal, "it spills");
}

TEST(TuneRecord, EveryTruncationIsRefusedWithAReason) {
  const std::string text = write_record({make_key(), "kernel", {{"kernel", 1, 1}}});
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
  const std::string text = write_record({make_key(), "kernel", {{"kernel", 1, 1}}});
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
  const auto read = read_record(write_record({make_key(), "kernel", {{"kernel", 1e305, 1e308}}}), &problem);
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
  Table table{make_key().templates, make_key().gpu, make_key().multiprocessors, kMethod, {}};
  table.rows = {{"problem b", "kernel 2", 0.9}, {"problem a", "kernel 1", 1.0}};
  return table;
}

TEST(TuneTable, FindsWhatWasMeasuredHere) {
  std::string problem;
  const std::optional<Table> table = read_table(write_table(make_table()), &problem);
  ASSERT_TRUE(table) << problem;
  EXPECT_EQ(table->find(make_key("problem a")), "kernel 1");
  EXPECT_EQ(table->find(make_key("problem b")), "kernel 2");
  EXPECT_EQ(table->find(make_key("problem c")), "");
  for (const auto change :
       {+[](RecordKey& key) { key.gpu = "NVIDIA H100"; }, +[](RecordKey& key) { key.multiprocessors = 78; },
        +[](RecordKey& key) { key.templates = "other"; }, +[](RecordKey& key) { key.method = "other"; }}) {
    RecordKey key = make_key("problem a");
    change(key);
    EXPECT_EQ(table->find(key), "");
  }
}

TEST(TuneTable, OneOfOtherTemplatesIsPassedOverWithADebugMessage) {
  const std::string good = write_table(make_table());
  Table old = make_table();
  old.templates = "fedcba9876543210fedcba9876543210";
  const std::string stale = write_table(old);
  const EmbeddedTable embedded[] = {{"stale.json", stale}, {"good.json", good}, {"broken.json", "{"}};
  std::vector<std::string> messages;
  set_log_level(LogLevel::debug);
  set_log_callback([&](LogLevel level, std::string_view message) {
    EXPECT_EQ(level, LogLevel::debug);
    messages.emplace_back(message);
  });
  const std::vector<Table> tables = usable_tables(embedded, make_key().templates);
  set_log_callback({});
  set_log_level(LogLevel::warning);
  ASSERT_EQ(tables.size(), 1U);
  EXPECT_EQ(tables[0].find(make_key("problem a")), "kernel 1");
  ASSERT_EQ(messages.size(), 2U);
  EXPECT_NE(messages[0].find("stale.json is not used: it was measured with other templates"), std::string::npos);
  EXPECT_NE(messages[1].find("broken.json"), std::string::npos);
}

TEST(TuneTable, ThoseThatTheLibraryCarriesAreReadable) {
  for (const EmbeddedTable& embedded : embedded_tables()) {
    std::string problem;
    const std::optional<Table> table = read_table(embedded.text, &problem);
    ASSERT_TRUE(table) << embedded.name << ": " << problem;
    EXPECT_FALSE(table->rows.empty()) << embedded.name;
    EXPECT_EQ(table->method, kMethod) << embedded.name;
  }
  EXPECT_EQ(shipped_tables(render::templates_digest()).size(),
            usable_tables(embedded_tables(), render::templates_digest()).size());
}

}  // namespace
}  // namespace fa::tune
