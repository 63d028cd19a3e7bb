#include "tests/bench/transport/settings.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "tests/bench/common/flags.h"

namespace headwater::bench {
namespace {

[[noreturn]] void Usage(const std::string& flag) {
  std::fprintf(stderr,
               "unknown flag or value: %s\n"
               "--engine=cuda|cpu --rows=N --hidden=N --vocab=N --clients=N --cases=PART,... --list --smoke\n"
               "--seconds=S --warmup=S --rounds=N --idle=S --headwaterd=PATH --python=PROGRAM --scripts=FOLDER\n"
               "--algorithms=FILE --output=FILE.csv --commit=NAME\n",
               flag.c_str());
  std::exit(2);
}

std::vector<std::string> Split(const std::string& value) {
  std::vector<std::string> parts;
  for (size_t start = 0; start <= value.size();) {
    const size_t end = std::min(value.find(',', start), value.size());
    if (end > start) parts.push_back(value.substr(start, end - start));
    start = end + 1;
  }
  return parts;
}

// `count` bf16 values of a normal distribution, by its quantiles: billions of them are wanted.
std::vector<uint16_t> NormalBits(int64_t count, double deviation, uint64_t seed) {
  constexpr size_t kQuantiles = 1 << 16;
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, static_cast<float>(deviation));
  std::vector<uint16_t> quantiles(kQuantiles);
  for (uint16_t& bits : quantiles) {
    const float value = normal(random);
    uint32_t pattern = 0;
    std::memcpy(&pattern, &value, sizeof(pattern));
    bits = static_cast<uint16_t>((pattern + 0x8000) >> 16);
  }
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); i += 4) {
    const uint64_t number = random();
    for (size_t part = 0; part < std::min<size_t>(4, values.size() - i); ++part) {
      values[i + part] = quantiles[(number >> (16 * part)) & 0xffff];
    }
  }
  return values;
}

}  // namespace

TransportSettings ParseTransportFlags(int argc, char** argv) {
  TransportSettings settings;
  for (int i = 1; i < argc; ++i) {
    const Flag flag(argv[i], Usage);
    const std::string& name = flag.name();
    const std::string& value = flag.value();
    if (name == "--engine" && (value == "cuda" || value == "cpu")) {
      settings.engine = value;
    } else if (name == "--rows") {
      settings.rows = static_cast<int64_t>(flag.Number(1, 1 << 18));
    } else if (name == "--hidden") {
      settings.hidden_size = static_cast<int64_t>(flag.Number(1, 1 << 16));
    } else if (name == "--vocab") {
      settings.vocab_size = static_cast<int64_t>(flag.Number(2, 1 << 20));
    } else if (name == "--clients") {
      settings.clients = static_cast<int>(flag.Number(1, 64));
    } else if (name == "--cases") {
      settings.cases = Split(value);
    } else if (flag.text() == "--list") {
      settings.list = true;
    } else if (flag.text() == "--smoke") {
      settings.smoke = true;
    } else if (flag.SetsBlocks(&settings.blocks)) {
      continue;
    } else if (name == "--headwaterd") {
      settings.headwaterd = value;
    } else if (name == "--python") {
      settings.python = value;
    } else if (name == "--scripts") {
      settings.scripts = value;
    } else if (name == "--algorithms") {
      settings.algorithms = value;
    } else if (name == "--output") {
      settings.output = value;
    } else if (name == "--commit") {
      settings.commit = value;
    } else {
      Usage(flag.text());
    }
  }
  if (settings.rows % settings.clients != 0) Usage("--clients must divide --rows");
  return settings;
}

Tensors::Tensors(const TransportSettings& settings)
    : weight(NormalBits(settings.vocab_size * settings.hidden_size, 1 / std::sqrt(static_cast<double>(settings.hidden_size)), 1)),
      hidden(NormalBits(settings.rows * settings.hidden_size, 1, 2)) {
  std::mt19937_64 random(3);
  for (int64_t i = 0; i < settings.rows; ++i) {
    targets.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(settings.vocab_size)));
  }
}

}  // namespace headwater::bench
