#include "tune/record.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "cache/digest.hpp"
#include "support/log.hpp"

namespace fa::tune {
namespace {

using Json = nlohmann::ordered_json;

/// A number as it stands there: what is no integer of 32 bits is not made one.
int whole(const Json& json, const char* field) {
  const Json& value = json.at(field);
  const bool fits = value.is_number_unsigned()
                        ? value.get<std::uint64_t>() <= std::numeric_limits<int>::max()
                        : value.is_number_integer() && value.get<std::int64_t>() >= std::numeric_limits<int>::min();
  if (!fits) throw std::range_error(std::string(field) + " is no integer of 32 bits");
  return value.get<int>();
}

/// Parses without exceptions of the parser's own; what `read` throws for a missing field becomes a reason.
template <typename Result, typename Read>
std::optional<Result> parse(std::string_view text, std::string* problem, const Read& read) {
  try {
    const Json json = Json::parse(text);
    if (whole(json, "schema") != kRecordSchema) {
      *problem = "it has another schema";
      return std::nullopt;
    }
    return read(json);
  } catch (const nlohmann::json::exception& error) {
    *problem = error.what();
  } catch (const std::range_error& error) {
    *problem = error.what();
  }
  return std::nullopt;
}

double rounded(double value) {
  const double millionths = std::round(value * 1e6);
  return std::isfinite(millionths) ? millionths / 1e6 : value;
}

}  // namespace

std::string RecordKey::digest() const {
  cache::FieldHasher hasher;
  hasher.number(kRecordSchema).text(templates).text(gpu);
  hasher.number(static_cast<std::uint64_t>(multiprocessors)).text(problem).text(method);
  return hasher.hex();
}

std::string write_record(const Record& record) {
  Json times = Json::array();
  for (const RecordedTime& time : record.times) {
    Json item{{"kernel", time.kernel}};
    if (time.refusal.empty()) {
      item["ratio"] = rounded(time.ratio);
      item["ms"] = rounded(time.milliseconds);
    } else {
      item["refusal"] = time.refusal;
    }
    times.push_back(item);
  }
  const Json json{{"schema", kRecordSchema},
                  {"templates", record.key.templates},
                  {"gpu", record.key.gpu},
                  {"multiprocessors", record.key.multiprocessors},
                  {"method", record.key.method},
                  {"problem", record.key.problem},
                  {"kernel", record.winner.kernel},
                  {"kernel_templates", record.winner.templates},
                  {"times", times}};
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::optional<Record> read_record(std::string_view text, std::string* problem) {
  return parse<Record>(text, problem, [](const Json& json) {
    Record record;
    record.key = {json.at("templates").get<std::string>(), json.at("gpu").get<std::string>(),
                  whole(json, "multiprocessors"), json.at("problem").get<std::string>(),
                  json.at("method").get<std::string>()};
    record.winner = {json.at("kernel").get<std::string>(), json.at("kernel_templates").get<std::string>()};
    for (const Json& item : json.at("times")) {
      record.times.push_back({item.at("kernel").get<std::string>(), item.value("ratio", 0.0), item.value("ms", 0.0),
                              item.value("refusal", std::string())});
    }
    return record;
  });
}

const Table::Row* Table::find(const RecordKey& key) const {
  if (key.gpu != gpu || key.multiprocessors != multiprocessors || key.method != method) return nullptr;
  const auto row = std::ranges::lower_bound(rows, key.problem, {}, &Row::problem);
  return row != rows.end() && row->problem == key.problem ? &*row : nullptr;
}

std::string write_table(Table table) {
  std::ranges::sort(table.rows, {}, &Table::Row::problem);
  Json rows = Json::array();
  for (const Table::Row& row : table.rows) {
    rows.push_back({{"problem", row.problem},
                    {"kernel", row.winner.kernel},
                    {"templates", row.winner.templates},
                    {"ratio", rounded(row.ratio)}});
  }
  const Json json{{"schema", kRecordSchema},
                  {"gpu", table.gpu},
                  {"multiprocessors", table.multiprocessors},
                  {"method", table.method},
                  {"rows", rows}};
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::optional<Table> read_table(std::string_view text, std::string* problem) {
  return parse<Table>(text, problem, [](const Json& json) {
    Table table;
    table.gpu = json.at("gpu").get<std::string>();
    table.multiprocessors = whole(json, "multiprocessors");
    table.method = json.at("method").get<std::string>();
    for (const Json& item : json.at("rows")) {
      table.rows.push_back({item.at("problem").get<std::string>(),
                            {item.at("kernel").get<std::string>(), item.at("templates").get<std::string>()},
                            item.value("ratio", 1.0)});
    }
    std::ranges::sort(table.rows, {}, &Table::Row::problem);
    return table;
  });
}

std::vector<Table> readable_tables(std::span<const EmbeddedTable> tables) {
  std::vector<Table> readable;
  for (const EmbeddedTable& embedded : tables) {
    std::string problem;
    std::optional<Table> table = read_table(embedded.text, &problem);
    if (table) {
      readable.push_back(std::move(*table));
    } else {
      support::logf(LogLevel::debug, "the tuned table {} is not used: {}", embedded.name, problem);
    }
  }
  return readable;
}

const std::vector<Table>& shipped_tables() {
  static auto* const tables = new std::vector(readable_tables(embedded_tables()));  // in use while the process ends
  return *tables;
}

}  // namespace fa::tune
