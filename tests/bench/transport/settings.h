// The settings of the transport benchmark, from its command line, and the tensors that all sides of it share.
#ifndef HEADWATER_TESTS_BENCH_TRANSPORT_SETTINGS_H_
#define HEADWATER_TESTS_BENCH_TRANSPORT_SETTINGS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tests/bench/common/alternating_blocks.h"

namespace headwater::bench {

struct TransportSettings {
  std::string engine = "cuda";  // of the server and of this process: cuda or cpu
  int64_t rows = 8192;          // of a micro-batch
  int64_t hidden_size = 4096;
  int64_t vocab_size = 128256;
  int clients = 64;                // of the case with many clients, whose rows together are a micro-batch's
  std::vector<std::string> cases;  // parts of their names; empty: all
  bool list = false;               // print the cases' names and end
  bool smoke = false;              // ratios are not judged: tests of the program itself
  BlockOptions blocks;
  std::string headwaterd;                         // empty: beside this program
  std::string python = "python3";                 // empty: no Python
  std::string scripts = "tests/bench/transport";  // folder of the workers in Python
  std::string algorithms;                         // file of the engines' algorithm cache; empty: in a temporary folder
  std::string output;                             // CSV file; empty: none
  std::string commit = "unknown";
};

// Ends the program with a message for an unknown flag or value.
TransportSettings ParseTransportFlags(int argc, char** argv);

// Random bf16 tensors: hidden states of standard deviation 1, and a weight that makes logits of standard deviation 1.
struct Tensors {
  explicit Tensors(const TransportSettings& settings);

  std::vector<uint16_t> weight;  // bf16 [vocab_size, hidden_size]
  std::vector<uint16_t> hidden;  // bf16 [rows, hidden_size]
  std::vector<int32_t> targets;  // [rows], all valid
};

}  // namespace headwater::bench

#endif  // HEADWATER_TESTS_BENCH_TRANSPORT_SETTINGS_H_
