// The plain computation with fp32 logits: the result of a careful implementation without any trick, for the tolerances of bf16 and
// fp16.
//
// Logits, softmax and losses are in fp32, and the gradient of the logits is rounded once to the head's storage type. Products
// accumulate in fp32; grad_hidden is rounded to its type, grad_weight kept in fp32.
#ifndef HEADWATER_TESTS_KERNELS_SUPPORT_PLAIN_COMPUTATION_H_
#define HEADWATER_TESTS_KERNELS_SUPPORT_PLAIN_COMPUTATION_H_

#include <vector>

#include "tests/kernels/support/problem.h"

namespace headwater::testing {

struct PlainTerm {
  double loss_sum = 0;
  std::vector<double> token_loss;
};

struct PlainResult {
  std::vector<PlainTerm> terms;
  std::vector<double> grad_hidden;               // [rows, hidden_size]
  std::vector<std::vector<double>> grad_weight;  // for each head [vocab_size, hidden_size]; empty if frozen
  std::vector<std::vector<double>> grad_bias;    // for each head [vocab_size]; empty if frozen or without bias
};

PlainResult ComputePlain(const Problem& problem);
// The same, computed once for all comparisons with `expected`, which is the problem's.
const PlainResult& PlainOf(const Problem& problem, const Expected& expected);

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_KERNELS_SUPPORT_PLAIN_COMPUTATION_H_
