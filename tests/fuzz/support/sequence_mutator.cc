// libFuzzer's mutations for rpc_sequence.cc: calls are copied, removed, moved, taken from another sequence, and their fields
// changed. Sequences are written as text, so that a finding can be read.
#include <algorithm>
#include <cstring>

#include "tests/fuzz/fuzz.pb.h"
#include "tests/fuzz/support/message_input.h"
#include "tests/fuzz/support/message_mutator.h"

namespace {

using headwater::fuzz::MessageMutator;
using headwater::fuzz::Sequence;

constexpr int kMaxCalls = 40;

size_t Put(const Sequence& sequence, uint8_t* out, size_t max_size, size_t otherwise) {
  const std::string text = headwater::fuzz::WriteMessageInput(sequence, /*text=*/true);
  if (text.size() > max_size) return otherwise;
  std::memcpy(out, text.data(), text.size());
  return text.size();
}

}  // namespace

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
  MessageMutator mutator(seed, {"*", "0", "1", "a", "b", "tenants/default/heads/a", "tenants/t/heads/a", "tenants/t", "c1", "k",
                                "m.safetensors", "..", std::string(16, 'e'), std::string(32, 's'), std::string(20, '\0')});
  Sequence sequence;
  if (!headwater::fuzz::ReadMessageInput(data, size, &sequence)) sequence.Clear();
  auto* const calls = sequence.mutable_calls();
  const auto any = [&] { return static_cast<int>(mutator.Below(static_cast<uint32_t>(calls->size()))); };
  const uint32_t kind = mutator.Below(8);
  if (calls->empty() || kind >= 4) {
    mutator.Mutate(&sequence);
  } else if (kind == 0 && calls->size() < kMaxCalls) {
    // The same again, here or later: a repeat.
    const auto again = calls->Get(any());
    *calls->Add() = again;
    for (int i = calls->size() - 1, to = any(); i > to; --i) calls->SwapElements(i, i - 1);
  } else if (kind == 1) {
    calls->SwapElements(any(), any());
  } else if (kind == 2) {
    auto* const call = calls->Mutable(any());
    call->set_background(!call->background());
  } else {
    mutator.Mutate(calls->Mutable(any()));
  }
  while (calls->size() > kMaxCalls) calls->RemoveLast();
  return Put(sequence, data, max_size, size);
}

extern "C" size_t LLVMFuzzerCustomCrossOver(const uint8_t* data1, size_t size1, const uint8_t* data2, size_t size2, uint8_t* out,
                                            size_t max_out_size, unsigned int seed) {
  MessageMutator mutator(seed, {});
  Sequence first;
  Sequence second;
  if (!headwater::fuzz::ReadMessageInput(data1, size1, &first) || !headwater::fuzz::ReadMessageInput(data2, size2, &second))
    return 0;
  // The beginning of one, and the end of the other.
  const int kept = static_cast<int>(mutator.Below(static_cast<uint32_t>(first.calls_size()) + 1));
  const int from = static_cast<int>(mutator.Below(static_cast<uint32_t>(second.calls_size()) + 1));
  while (first.calls_size() > kept) first.mutable_calls()->RemoveLast();
  for (int i = from; i < second.calls_size() && first.calls_size() < kMaxCalls; ++i) *first.add_calls() = second.calls(i);
  return Put(first, out, max_out_size, 0);
}
