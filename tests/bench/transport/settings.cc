#include "tests/bench/transport/settings.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "tests/bench/common/flags.h"

namespace headwater::bench {
namespace {

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
  Flags flags;
  flags.Choice("--engine", {"cuda", "cpu"}, &settings.engine);
  flags.Number("--rows", 1, 1 << 18, &settings.rows);
  flags.Number("--hidden", 1, 1 << 16, &settings.hidden_size);
  flags.Number("--vocab", 2, 1 << 20, &settings.vocab_size);
  flags.Number("--clients", 1, 64, &settings.clients);
  flags.Names("--cases", {}, &settings.cases);
  flags.Switch("--list", &settings.list);
  flags.Switch("--smoke", &settings.smoke);
  flags.Blocks(&settings.blocks);
  flags.Text("--headwaterd", &settings.headwaterd);
  flags.Text("--python", &settings.python);
  flags.Text("--scripts", &settings.scripts);
  flags.Text("--algorithms", &settings.algorithms);
  flags.Text("--output", &settings.output);
  flags.Text("--commit", &settings.commit);
  flags.Parse(argc, argv);
  if (settings.rows % settings.clients != 0) {
    std::fprintf(stderr, "--clients must divide --rows\n");
    std::exit(2);
  }
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
