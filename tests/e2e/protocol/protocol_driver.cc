// protocol_driver: runs the operations of a protocol case with the C++ client: a line in, its outcome as a line of JSON out.
//
// The first word of a line is the operation; `key=value` and bare words are its options. `on=NAME` is the handle, without
// it "h"; `client=NAME` the client, without it "main".
#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "headwater/client/client.h"
#include "headwater/client/error.h"

namespace headwater::e2e {
namespace {

using namespace headwater::client;
using nlohmann::json;
using std::chrono::milliseconds;

constexpr int64_t kHiddenSize = 4;
constexpr int64_t kVocabSize = 8;

json ErrorOutcome(const absl::Status& status) {
  std::string reason = ErrorReason(status);
  if (reason.empty()) reason = absl::StatusCodeToString(status.code());
  json outcome = {{"ok", false}, {"reason", reason}, {"message", std::string(status.message())}};
  if (const auto lost = RestoredFrom(status); lost.has_value()) {
    outcome["restored_step"] = lost->restored_step;
    outcome["checkpoint"] = lost->checkpoint;
    for (const auto& [name, step] : lost->checkpoints) outcome["checkpoints"][name] = step;
  }
  return outcome;
}

json Outcome(const absl::Status& status) { return status.ok() ? json{{"ok", true}} : ErrorOutcome(status); }

// A line in parts.
struct Line {
  explicit Line(const std::string& text) {
    std::istringstream stream(text);
    for (std::string word; stream >> word;) {
      const size_t equals = word.find('=');
      if (equals == std::string::npos) {
        words.push_back(word);
      } else {
        options[word.substr(0, equals)] = word.substr(equals + 1);
      }
    }
  }
  std::string Option(const std::string& name, const std::string& otherwise) const {
    const auto option = options.find(name);
    return option == options.end() ? otherwise : option->second;
  }
  int64_t Number(const std::string& name, int64_t otherwise) const { return std::stoll(Option(name, std::to_string(otherwise))); }
  bool Has(const std::string& word) const { return std::find(words.begin(), words.end(), word) != words.end(); }

  std::vector<std::string> words;
  std::map<std::string, std::string> options;
};

// A call under way.
struct Call {
  std::function<json()> get;  // waits for its end
  std::function<void()> cancel = [] {};
  std::function<bool()> ready;
};

template <typename T>
Call FutureCall(Future<T> future, std::function<json(absl::StatusOr<T>)> outcome) {
  auto shared = std::make_shared<Future<T>>(std::move(future));
  return {[shared, outcome = std::move(outcome)] { return outcome(shared->Get()); }, [shared] { shared->Cancel(); },
          [shared] { return shared->Ready(); }};
}

// A blocking call on a thread of its own.
Call BlockingCall(std::function<absl::Status()> work) {
  auto shared = std::make_shared<std::future<absl::Status>>(std::async(std::launch::async, std::move(work)));
  return {[shared] { return Outcome(shared->get()); }, [] {},
          [shared] { return shared->wait_for(milliseconds(0)) == std::future_status::ready; }};
}

class Driver {
 public:
  json Run(const std::string& text) {
    Line line(text);
    const std::string operation = Shift(line);
    if (operation == "start") {
      const std::string name = Shift(line);
      const std::string started = Shift(line);
      calls_[name] = Begin(started, line);
    } else if (operation == "end") {
      return calls_.extract(line.words[0]).mapped().get();
    } else if (operation == "pending") {
      return {{"ok", true}, {"pending", !calls_.at(line.words[0]).ready()}};
    } else if (operation == "cancel") {
      calls_.at(line.words[0]).cancel();
    } else if (operation == "connect") {
      return Connect(line);
    } else if (operation == "open") {
      return Open(line.words[0], line);
    } else if (operation == "drop") {
      heads_.erase(line.words[0]);
    } else if (operation == "close") {
      Close("main");
    } else if (operation == "reset") {
      Reset();
    } else if (operation == "epoch") {
      return {{"ok", true}, {"epoch", EpochName(line.words[0])}};
    } else {
      return Begin(operation, line).get();
    }
    return {{"ok", true}};
  }

 private:
  struct Handle {
    Head head;
    int64_t step;
    std::string client;
  };

  // The server pads the names of its epochs with dots.
  std::string EpochName(const std::string& name) {
    const std::string epoch = heads_.at(name).head.epoch();
    return epoch.substr(0, epoch.find_last_not_of('.') + 1);
  }

  static std::string Shift(Line& line) {
    std::string first = line.words.at(0);
    line.words.erase(line.words.begin());
    return first;
  }

  json Connect(const Line& line) {
    const std::string name = line.Option("client", "main");
    Close(name);
    ClientOptions options;
    const milliseconds backoff(line.Number("backoff_ms", 2));
    options.retry = {.max_attempts = static_cast<int>(line.Number("max_attempts", 3)),
                     .initial_backoff = backoff,
                     .max_backoff = milliseconds(line.Number("max_backoff_ms", line.Number("backoff_ms", 4)))};
    options.session_lease = milliseconds(line.Number("lease_ms", 30000));
    options.replay_bytes = line.Number("replay_bytes", 0);
    if (line.options.contains("replay_steps")) options.replay_steps = line.Number("replay_steps", 0);
    options.transport = Transport::kGrpc;
    absl::StatusOr<Client> client = Client::Connect(line.Option("target", ""), options);
    if (!client.ok()) return ErrorOutcome(client.status());
    clients_.insert_or_assign(name, *std::move(client));
    return Open(name == "main" ? "h" : name + "-h", Line("head=h client=" + name));
  }

  json Open(const std::string& name, const Line& line) {
    const std::string client = line.Option("client", "main");
    absl::StatusOr<Head> head = clients_.at(client).OpenHead(line.Option("head", name));
    if (!head.ok()) return ErrorOutcome(head.status());
    int64_t step = 0;
    if (head->spec().trainable) {
      absl::StatusOr<HeadInfo> info = head->Info();
      if (!info.ok()) return ErrorOutcome(info.status());
      step = info->open_step.value_or(0);
    }
    heads_.insert_or_assign(name, Handle{*std::move(head), step, client});
    return {{"ok", true}};
  }

  void Close(const std::string& client) {
    contributions_.clear();
    std::erase_if(heads_, [&client](const auto& entry) { return entry.second.client == client; });
    clients_.erase(client);
  }

  void Reset() {
    for (auto& [name, call] : calls_) call.cancel();
    calls_.clear();
    heads_.clear();
    contributions_.clear();
    clients_.clear();
  }

  Call Begin(const std::string& operation, const Line& line) {
    Handle& handle = heads_.at(line.Option("on", "h"));
    handle.step = line.Number("step", handle.step);
    const int64_t step = handle.step;
    const CallOptions options = {.timeout = milliseconds(line.Number("timeout_ms", 0))};
    const std::string word = line.words.empty() ? "" : line.words[0];
    const auto value = static_cast<float>(line.Number("value", 1));
    const std::vector<float> weight(kVocabSize * kHiddenSize, value);
    if (operation == "loss" || operation == "forward") return Loss(operation, line, handle, options, value);
    const auto outcome = [](const auto& result) { return Outcome(result.status()); };
    if (operation == "commit") {
      const double factor = std::stod(line.Option("factor", "1"));
      if (line.Has("contribution")) {
        return FutureCall<CommitResult>(contributions_.at(std::stoll(word)).Commit({.factor = factor}, options), outcome);
      }
      return FutureCall<CommitResult>(handle.head.Commit(step, std::stoll(word), factor, options), outcome);
    }
    if (operation == "discard") {
      return FutureCall<DiscardResult>(handle.head.Discard(step, std::stoll(word), options), outcome);
    }
    return BlockingCall([=, &handle, client = clients_.at(handle.client)]() mutable -> absl::Status {
      Head& head = handle.head;
      const auto moved_to = [&handle](const auto& result) {
        if (result.ok()) handle.step = result->open_step;
        return result.status();
      };
      const auto adopt = [&handle](const absl::StatusOr<HeadInfo>& info) {
        if (info.ok()) handle.step = info->open_step.value_or(0);
        return info.status();
      };
      if (operation == "seal") return head.Seal(step, Expected(line), {}, options).status();
      if (operation == "apply") {
        ApplyOptions apply = {.learning_rate = 0.1, .allow_empty = true};
        if (line.options.contains("expected")) apply.expected = Expected(line);
        return moved_to(head.Apply(step, apply, options));
      }
      if (operation == "discard_gradient") return moved_to(head.DiscardGradient(step, options));
      if (operation == "gradient_part") {
        const std::vector<float> rows(2 * kHiddenSize, value);
        return head.AddGradient(step, std::stoll(word), RowsView::Float32(rows, kHiddenSize), 0, 1.0, options).status();
      }
      if (operation == "gradient") return head.Gradient(step, HeadTensor::kWeight, 1.0, options).status();
      if (operation == "gradient_norm") return head.GradientNorm(step, 1.0, options).status();
      if (operation == "weight") return head.DownloadWeights(HeadTensor::kWeight, options).status();
      if (operation == "step_state") return head.GetStep(options).status();
      if (operation == "info") return head.Info(options).status();
      if (operation == "delete") return head.Delete(false, options);
      if (operation == "take") return adopt(head.Take(line.Has("if_current"), options));
      if (operation == "upload") return adopt(head.UploadWeights(HeadTensor::kWeight, TensorView::Float32(weight), options));
      if (operation == "replace") {
        return adopt(head.ReplaceWeights(step, TensorView::Float32(weight), std::nullopt, options));
      }
      if (operation == "save") return head.Save(word, line.Has("overwrite"), options).status();
      if (operation == "delete_checkpoint") return client.DeleteCheckpoint(line.Option("on", "h"), word, options).status();
      if (operation == "restore") return adopt(head.Restore(word, options));
      if (operation == "load") return adopt(head.LoadWeights(word, "", "", options));
      if (operation == "list") return client.ListHeads(options).status();
      if (operation == "create") return client.CreateHead(word, head.spec(), options).status();
      if (operation == "attach") return client.AttachHead(word, head.spec(), options).status();
      return absl::UnimplementedError(operation);
    });
  }

  static ExpectedMicroBatches Expected(const Line& line) {
    const std::string text = line.Option("expected", "");
    if (text.find('+') == std::string::npos) return int64_t{std::stoll(text)};
    std::vector<int64_t> ids;
    std::istringstream stream(text);
    for (std::string id; std::getline(stream, id, '+');) ids.push_back(std::stoll(id));
    return ids;
  }

  // A micro-batch of one row, which is overwritten as soon as the call has ended.
  Call Loss(const std::string& operation, const Line& line, Handle& handle, const CallOptions& options, float value) {
    const auto rows = std::make_shared<std::vector<float>>(kHiddenSize, value);
    const RowsView view = RowsView::Float32(*rows, kHiddenSize);
    const std::vector<int32_t> targets = {1};
    MicroBatchOptions micro_batch = {.forward_only = operation == "forward", .return_grad_hidden = false};
    if (!micro_batch.forward_only) {
      micro_batch.step = handle.step;
      micro_batch.micro_batch = std::stoll(line.words[0]);
      micro_batch.attempt = line.Number("attempt", 0);
      if (line.Has("explicit")) micro_batch.commit = CommitMode::kExplicit;
    }
    const auto outcome = [this, rows, id = micro_batch.micro_batch.value_or(0)](const auto& result) {
      std::fill(rows->begin(), rows->end(), -99.0F);
      if (!result.ok()) return ErrorOutcome(result.status());
      if (result->contribution.has_value()) contributions_.insert_or_assign(id, *result->contribution);
      constexpr const char* kStates[] = {"NONE", "IN_PROGRESS", "STAGED", "COMMITTED", "DISCARDED"};
      return json{{"ok", true}, {"attempt", result->attempt}, {"state", kStates[static_cast<int>(result->state)]}};
    };
    if (line.options.contains("also")) {
      std::vector<LossTerm> terms(2);
      for (LossTerm& term : terms) term.targets = targets;
      terms[1].head = heads_.at(line.Option("also", "")).head;
      return FutureCall<MultiResult>(handle.head.Multi(view, terms, micro_batch, options), outcome);
    }
    if (line.options.contains("teacher")) {
      const Head& teacher = heads_.at(line.Option("teacher", "")).head;
      return FutureCall<LossResult>(handle.head.Jsd(view, teacher, view, {}, {}, micro_batch, options), outcome);
    }
    if (line.options.contains("joined")) {
      JoinedTeacherOptions joined;
      joined.join_key = line.Option("joined", "");
      joined.total_rows = 1;
      return FutureCall<LossResult>(handle.head.Jsd(view, heads_.at("teacher").head, joined, {}, {}, micro_batch, options),
                                    outcome);
    }
    return FutureCall<LossResult>(handle.head.CrossEntropy(view, targets, {}, micro_batch, options), outcome);
  }

  std::map<std::string, Client> clients_;
  std::map<std::string, Handle> heads_;
  std::map<int64_t, Contribution> contributions_;  // by micro-batch
  std::map<std::string, Call> calls_;
};

}  // namespace
}  // namespace headwater::e2e

int main() {
  headwater::e2e::Driver driver;
  for (std::string line; std::getline(std::cin, line);) std::cout << driver.Run(line).dump() << std::endl;
  return 0;
}
