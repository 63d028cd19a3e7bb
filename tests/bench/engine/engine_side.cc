// An engine, and the bare products of its shapes, for the scripts that time both in turn (blocks.py) and with what others compute.
//
//   engine_side_cuda [devices=1] [workspace_mib=N] [algorithms=FILE] [folder=FOLDER]     # or engine_side_cpu
//
// Requests (serve.h). `of` is the name of a problem, of which several may be loaded; without it the name is empty.
//
// - machine: DescribeMachine().
// - load of=NAME SHAPE...: makes rows, heads and targets, or reads them from raw files of FOLDER; see Shape. Answers with the
//   process's resident bytes, rows included, before there was an engine, and the head's workspace in MiB.
// - WORK of=NAME count=N [in_group=1]: see Problem::Run(). Answers with the milliseconds of one, by the clock and of
//   processor time, and with those of each device of several.
// - loss of=NAME [grad_hidden=1] [grad_weight=1] [in_group=1]: each device's sum of the first micro-batch's losses. Writes the
//   gradients (grad_weight in fp32) into files of these names in FOLDER. Nothing is left in the accumulator.
// - resolution of=NAME tau=T: the gradient_resolution of what is computed from now on.
// - peak: the most bytes that were resident since the last `load` ended.
// - free of=NAME: frees the memory of what was loaded.
//
// With several devices each computes alone, all at the same time, or with in_group as a rank of their group.
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <future>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "headwater/kernels/engine.h"
#include "server/heads/head.h"
#include "server/heads/steps/submit.h"
#include "tests/bench/common/backend.h"
#include "tests/bench/common/serve.h"

namespace headwater::bench {
namespace {

constexpr double kLearningRate = 1e-6;  // the loss of rows that are seen thousands of times stays what it is

// A problem's options, which `load` takes by the members' names.
class Shape {
 public:
  explicit Shape(Request& request) : request_(&request) {
    const bool is_whole = rows > 0 && width > 0 && vocab > 0 && micro_batches > 0 && rows % micro_batches == 0;
    if (!is_whole) throw std::runtime_error("not a shape");
    request_ = nullptr;
  }

 private:
  template <typename T = int64_t>
  T Take(const char* name, T standard = 0) {
    return request_->Take<T>(name, standard);
  }
  bool Has(const char* name) { return Take<bool>(name, false); }

  Request* request_;  // while the members below are made

 public:
  const DataType type = Take<std::string>("type", "bfloat16") == "float32" ? DataType::kFloat32 : DataType::kBFloat16;
  const int64_t rows = Take("rows"), width = Take("width"), vocab = Take("vocab");
  const double deviation = Take<double>("deviation");  // of the weight; 0: for logits of standard deviation 1
  const double ignored = Take<double>("ignored");      // share of the targets; the floor computes all rows
  const double loss_scale = Take<double>("loss_scale", 1);
  const bool files = Has("files");        // of hidden, weight, teacher_hidden, teacher_weight, targets (int32)
  const bool products = Has("products");  // the weight is kept, for `products` and `submit`
  const bool frozen = Has("frozen");      // no gradient of the weight
  const bool on_host = Has("on_host");    // rows and grad_hidden are in page-locked host memory
  const bool options = Has("options");    // bias, smoothing, softcap, z-loss, class weights, every per-token output
  const int64_t staging_slots = Take("staging_slots");
  const int64_t teacher_width = Take("teacher_width");  // divergence; 0: cross entropy
  const bool int8_teacher = Has("int8_teacher");        // the floor has the product of 16 bits all the same
  const double beta = Take<double>("beta", 0.5);
  const int64_t top_k =
      Take("top_k");  // entries of a top-k teacher in place of the teacher, whose product is still part of the floor
  const int64_t micro_batches = Take("micro_batches", int64_t{1});
  const bool at_once = Has("at_once");  // the floor computes all rows, and `add` all micro-batches, each by its own caller
  // Micro-batches of a step that the ranks share, each of all rows. 0: all ranks compute each micro-batch, and there are no steps.
  const int64_t step_micro_batches = Take("step_micro_batches");
  // Calls of a loss with separate calls for forward and backward (docs/adr/0027): outputs, and the gradient by factors of each row.
  const bool forward = Has("forward"), backward = Has("backward");
  const bool entropy = Has("entropy");              // as an output and with factors, beside loss and log-sum-exp
  const bool other_outputs = Has("other_outputs");  // mean_logits and log_sum_sq_probs

  int64_t micro_batch_rows() const { return rows / micro_batches; }
};

// `VmRSS` or `VmHWM` of this process in bytes.
double ResidentBytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field + ":", 0) == 0) return std::atof(line.c_str() + field.size() + 1) * 1024;
  }
  throw std::runtime_error("no " + field + " in /proc/self/status");
}

double ProcessorSeconds() {
  timespec time = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Rows and heads of one shape on one engine. `engine` is called when the rows are there. `has_sums`: the engine returns the losses'
// sums, which are undefined on most ranks of a group.
class Problem {
 public:
  Problem(const std::function<LossEngine&()>& engine, bool has_sums, const Shape& shape, const std::string& folder)
      : has_sums_(has_sums),
        shape_(shape),
        folder_(folder),
        hidden_(Rows("hidden", shape.width, 21)),
        grad_hidden_(Allocate(HiddenBytes(), shape.on_host)) {
    MakeTargets();
    if (shape_.teacher_width > 0) teacher_hidden_ = Rows("teacher_hidden", shape_.teacher_width, 22);
    resident_bytes_ = ResidentBytes("VmRSS");
    engine_ = &engine();
    weight_ = Weight("weight", shape_.width, 11);
    head_ = MakeHead(shape_.width, /*is_student=*/true, weight_);
    if (shape_.teacher_width > 0 && (shape_.top_k == 0 || shape_.products)) {
      teacher_weight_ = Weight("teacher_weight", shape_.teacher_width, 12);
      if (shape_.top_k == 0) teacher_ = MakeHead(shape_.teacher_width, /*is_student=*/false, teacher_weight_);
    }
    if (!shape_.products) weight_ = teacher_weight_ = nullptr;
    if (shape_.options) {
      for (int64_t v = 0; v < shape_.vocab; ++v) class_weights_.push_back(0.5f + 0.25f * static_cast<float>(v % 5));
    }
    for (int64_t i = 0; i < shape_.rows * shape_.top_k; ++i) {
      // Different ones in a row, anywhere in the vocabulary.
      top_k_ids_.push_back(static_cast<int32_t>((i / shape_.top_k * 7919 + i % shape_.top_k * 1999) % shape_.vocab));
      top_k_log_probs_.push_back(static_cast<float>(std::log(0.9 / static_cast<double>(shape_.top_k))));
    }
    Zero();
  }

  // Does a work so many times in a row, as `rank` of so many that share it.
  void Run(const std::string& work, int64_t count, int32_t rank, int32_t ranks) {
    if (work == "products") return RunProducts(count);
    if (work == "add" && shape_.at_once) {
      std::vector<std::future<void>> callers;
      for (int64_t number = 0; number < shape_.micro_batches; ++number) {
        callers.push_back(std::async(std::launch::async, [this, number, count] {
          for (int64_t i = 0; i < count; ++i) ComputeMicroBatch(number);
        }));
      }
      for (std::future<void>& caller : callers) caller.get();
      return;
    }
    for (int64_t i = 0; i < count; ++i) {
      if (work == "add") {  // the first micro-batch, to the accumulator
        ComputeMicroBatch(0);
      } else if (work == "step") {  // the accumulator cleared, every micro-batch, nothing put off left
        Zero();
        for (int64_t number = 0; number < shape_.micro_batches; ++number) ComputeMicroBatch(number);
        float element = 0;  // all of the gradient, if one element is read
        Require(head_->ReadTensor(HeadTensor::kGradWeight, 0, 1, &element));
      } else if (work == "train") {  // the rank's share of the step, or with all ranks the one micro-batch
        Train(rank, ranks);
      } else if (work == "commit") {  // staged and committed
        Require(ComputeMicroBatch(0, GradWeightMode::kStage).staged->Commit(1));
      } else if (work == "submit") {  // to a head of the server, added in place
        Submit();
      } else if (work == "calls" || work == "plain") {  // those of the shape, or plain ones of a cross entropy with token weights
        MakeCalls(/*is_plain=*/work == "plain");
      } else {
        throw std::runtime_error("no such work: " + work);
      }
    }
  }

  double Loss(bool write_grad_hidden, bool write_grad_weight) {
    Zero();
    const double loss = ComputeMicroBatch(0).terms[0].loss_sum;
    if (write_grad_hidden) {
      std::vector<uint8_t> rows(static_cast<size_t>(HiddenBytes() / shape_.micro_batches));
      Copy(rows.data(), grad_hidden_.get(), static_cast<int64_t>(rows.size()));
      Write("grad_hidden", rows.data(), rows.size());
    }
    if (write_grad_weight) {
      std::vector<float> gradient(static_cast<size_t>(shape_.vocab * shape_.width));
      Require(head_->ReadTensor(HeadTensor::kGradWeight, 0, shape_.vocab * shape_.width, gradient.data()));
      Write("grad_weight", gradient.data(), gradient.size() * sizeof(float));
    }
    Zero();
    return loss;
  }

  void set_resolution(double tau) { resolution_ = tau; }
  double resident_bytes() const { return resident_bytes_; }
  double WorkspaceMib() const {
    double bytes = 0;
    for (const MemoryPlan::Item& item : head_->plan().items)
      bytes += item.purpose == "workspace" ? static_cast<double>(item.bytes) : 0;
    return bytes / (1 << 20);
  }

 private:
  int64_t ElementSize() const { return ElementBytes(shape_.type); }
  int64_t HiddenBytes() const { return shape_.rows * shape_.width * ElementSize(); }

  void ReadFile(const std::string& name, void* data, int64_t bytes) const {
    std::ifstream file(folder_ + "/" + name, std::ios::binary);
    if (!file.read(static_cast<char*>(data), bytes))
      throw std::runtime_error(name + " cannot be read, or has fewer bytes than the shape");
  }

  void Write(const std::string& name, const void* data, size_t bytes) const {
    std::ofstream file(folder_ + "/" + name, std::ios::binary);
    file.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
    if (!file.flush()) throw std::runtime_error(name + " cannot be written");
  }

  Memory Input(const std::string& name, int64_t count, uint64_t seed, double deviation) const {
    if (!shape_.files) return MakeNormal(shape_.type, count, seed, deviation);
    std::vector<uint8_t> values(static_cast<size_t>(count * ElementSize()));
    ReadFile(name, values.data(), count * ElementSize());
    return CopyOf(values.data(), count * ElementSize());
  }

  static Memory CopyOf(const void* data, int64_t bytes, bool on_host = false) {
    Memory memory = Allocate(bytes, on_host);
    Copy(memory.get(), data, bytes);
    return memory;
  }

  Memory Rows(const std::string& name, int64_t width, uint64_t seed) const {
    const Memory rows = Input(name, shape_.rows * width, seed, 1);
    return shape_.on_host ? CopyOf(rows.get(), shape_.rows * width * ElementSize(), /*on_host=*/true) : rows;
  }

  Memory Weight(const std::string& name, int64_t width, uint64_t seed) const {
    return Input(name, shape_.vocab * width, seed,
                 shape_.deviation > 0 ? shape_.deviation : 1 / std::sqrt(static_cast<double>(width)));
  }

  void MakeTargets() {
    const auto bytes = shape_.rows * static_cast<int64_t>(sizeof(int32_t));
    std::mt19937_64 random(31);
    if (shape_.files) {
      targets_.resize(static_cast<size_t>(shape_.rows));
      ReadFile("targets", targets_.data(), bytes);
    } else {
      for (int64_t i = 0; i < shape_.rows; ++i) {
        targets_.push_back(static_cast<int32_t>(std::uniform_int_distribution<int64_t>(0, shape_.vocab - 1)(random)));
      }
    }
    if (shape_.products) valid_targets_ = CopyOf(targets_.data(), bytes);
    // Exactly that share, anywhere.
    std::vector<size_t> order(targets_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    order.resize(static_cast<size_t>(std::lround(shape_.ignored * static_cast<double>(shape_.rows))));
    for (const size_t row : order) targets_[row] = kDefaultIgnoreIndex;
    // For the calls with factors of each row.
    std::normal_distribution<float> normal;
    for (std::vector<float>* factors : {&token_weights_, &entropy_factors_, &lse_factors_}) {
      for (int64_t i = 0; i < shape_.rows; ++i) factors->push_back(normal(random));
    }
    for (std::vector<float>* output :
         {&token_loss_, &lse_, &target_log_probability_, &entropy_, &mean_logits_, &log_sum_sq_probs_}) {
      output->resize(targets_.size());
    }
    argmax_.resize(targets_.size());
  }

  HeadSpec Spec(int64_t width, bool is_student) const {
    HeadSpec spec;
    spec.vocab_size = spec.transform.valid_vocab_size = shape_.vocab;
    spec.hidden_size = width;
    spec.data_type = shape_.type;
    spec.trainable = is_student && !shape_.frozen;
    if (spec.trainable) spec.staging_slots = static_cast<int32_t>(shape_.staging_slots);
    spec.has_bias = is_student && shape_.options;
    spec.int8_teacher = !is_student && shape_.int8_teacher;
    if (spec.has_bias) spec.transform.softcap = 30;
    if (shape_.step_micro_batches > 0) {
      spec.parallelism = Parallelism::kRows;
      if (spec.trainable) spec.optimizer = AdamWSpec();
    }
    return spec;
  }

  std::unique_ptr<EngineHead> MakeHead(int64_t width, bool is_student, const Memory& weight) {
    const HeadSpec spec = Spec(width, is_student);
    std::unique_ptr<EngineHead> head = Require(engine_->CreateHead(spec));
    WriteTensor(*head, HeadTensor::kWeight, weight, shape_.vocab * width);
    if (spec.has_bias) WriteTensor(*head, HeadTensor::kBias, MakeNormal(shape_.type, shape_.vocab, 13, 0.5), shape_.vocab);
    return head;
  }

  // By parts: filling gigabytes of fresh memory takes longer than to copy them.
  void WriteTensor(EngineHead& head, HeadTensor tensor, const Memory& values, int64_t count) const {
    std::vector<uint8_t> part(size_t{32} << 20);
    const int64_t part_count = static_cast<int64_t>(part.size()) / ElementSize();
    for (int64_t start = 0; start < count; start += part_count) {
      const int64_t elements = std::min(part_count, count - start);
      Copy(part.data(), values.get() + start * ElementSize(), elements * ElementSize());
      Require(head.WriteTensor(tensor, start, elements, part.data()));
    }
  }

  void Zero() {
    if (!shape_.frozen) Require(head_->ZeroGradient());
  }

  void RunProducts(int64_t count) {
    if (products_ == nullptr) {  // at their first use: they search algorithms
      products_ = MakeProducts({.type = shape_.type,
                                .rows = shape_.at_once ? shape_.rows : shape_.micro_batch_rows(),
                                .width = shape_.width,
                                .vocab = shape_.vocab,
                                .hidden = hidden_.get(),
                                .weight = weight_.get(),
                                .targets = valid_targets_.get(),
                                .teacher_width = shape_.teacher_width,
                                .teacher_hidden = teacher_hidden_.get(),
                                .teacher_weight = teacher_weight_.get()});
    }
    products_->Run(count);
  }

  template <typename T>
  absl::Span<const T> Part(const std::vector<T>& values, int64_t start, int64_t count) const {
    return absl::MakeConstSpan(values).subspan(static_cast<size_t>(start), static_cast<size_t>(count));
  }

  MemorySpace memory() const { return shape_.on_host ? MemorySpace::kHost : kMemorySpace; }

  // A term of rows [start, start + count).
  LossTerm Term(int64_t start, int64_t count) {
    LossTerm term;
    term.head = head_.get();
    term.row_count = count;
    term.targets = Part(targets_, start, count);
    term.loss_scale = shape_.loss_scale;
    term.gradient_resolution = resolution_;
    term.dither_seed = ++seed_;
    return term;
  }

  MicroBatchResult ComputeMicroBatch(int64_t number, GradWeightMode mode = GradWeightMode::kAccumulate) {
    const int64_t count = shape_.micro_batch_rows(), start = number * count;
    const auto first = static_cast<size_t>(start);
    LossTerm term = Term(start, count);
    if (shape_.top_k > 0) {
      term.loss = TopKSpec{static_cast<int32_t>(shape_.top_k), Part(top_k_ids_, start * shape_.top_k, count * shape_.top_k),
                           Part(top_k_log_probs_, start * shape_.top_k, count * shape_.top_k)};
    } else if (teacher_ != nullptr) {
      JsdSpec spec = {.beta = shape_.beta};
      term.loss = spec;
      term.teacher_head = teacher_.get();
      term.teacher_hidden = {teacher_hidden_.get() + start * shape_.teacher_width * ElementSize(), count, shape_.teacher_width,
                             shape_.type, memory()};
    } else if (shape_.options) {
      term.loss = CrossEntropySpec{0.1, 1e-4, class_weights_};
      term.token_loss = &token_loss_[first];
      term.lse = &lse_[first];
      term.target_log_probability = &target_log_probability_[first];
      term.entropy = &entropy_[first];
      term.argmax = &argmax_[first];
    }
    return Compute(term, start, /*backward=*/true, mode);
  }

  void MakeCalls(bool is_plain) {
    LossTerm term = Term(0, shape_.rows);
    const bool with_entropy = shape_.entropy && !is_plain;
    if (shape_.forward) {
      LossTerm outputs = term;
      outputs.token_loss = token_loss_.data();
      if (!is_plain) outputs.lse = lse_.data();
      if (with_entropy) outputs.entropy = entropy_.data();
      if (shape_.other_outputs && !is_plain) {
        outputs.mean_logits = mean_logits_.data();
        outputs.log_sum_sq_probs = log_sum_sq_probs_.data();
      }
      Compute(outputs, 0, /*backward=*/false);
    }
    if (shape_.backward) {
      term.token_weights = token_weights_;
      if (!is_plain) term.lse_factors = lse_factors_;
      if (with_entropy) term.entropy_factors = entropy_factors_;
      Compute(term, 0, /*backward=*/true);
    }
  }

  MicroBatchResult Compute(const LossTerm& term, int64_t start, bool backward, GradWeightMode mode = GradWeightMode::kAccumulate) {
    const int64_t offset = start * shape_.width * ElementSize();
    MicroBatch micro_batch;
    micro_batch.hidden = {hidden_.get() + offset, term.row_count, shape_.width, shape_.type, memory()};
    micro_batch.terms = absl::MakeConstSpan(&term, 1);
    micro_batch.backward = backward;
    if (backward) {
      micro_batch.grad_hidden = {grad_hidden_.get() + offset, term.row_count, shape_.width, shape_.type, memory()};
      micro_batch.grad_weight = shape_.frozen ? GradWeightMode::kNone : mode;
    }
    MicroBatchResult result = Require(engine_->Compute(micro_batch));
    ExpectPlausible(result.terms[0], term);
    return result;
  }

  void ExpectPlausible(const LossSums& sums, const LossTerm& term) const {
    const double mean = sums.loss_sum / static_cast<double>(sums.valid_token_count);
    // With weights of either sign it may be anything small; the files may hold a teacher that is nearly the student.
    const double least = !term.token_weights.empty() ? -20 : shape_.files ? 0 : 0.01;
    const bool all_count = shape_.ignored > 0 || sums.valid_token_count == term.row_count;
    if (has_sums_ && !(mean > least && mean < 20 && all_count && sums.non_finite_row_count == 0)) {
      throw std::runtime_error("the engine computed nonsense");
    }
  }

  void Train(int32_t rank, int32_t ranks) {
    const int64_t count = shape_.step_micro_batches;
    if (count == 0) {
      ComputeMicroBatch(0);
      return;
    }
    for (int64_t i = count * rank / ranks; i < count * (rank + 1) / ranks; ++i) ComputeMicroBatch(0);
    Require(head_->ReduceGradient());
    Require(head_->ComputeGradientStats().status());
    Require(head_->ApplyOptimizer({.learning_rate = kLearningRate, .settings = AdamWSpec(), .update_count = ++update_count_}));
  }

  void Submit() {
    if (served_ == nullptr) {
      const heads::HeadName name = {heads::kDefaultTenant, "bench"};
      served_ = Require(heads::Head::Create(name, Spec(shape_.width, true), *engine_, heads::HeadLimits(),
                                            std::make_shared<scheduler::Sequencer>()));
      Require(served_
                  ->SetTensor(served_->Describe().epoch, HeadTensor::kWeight, shape_.type, weight_.get(),
                              shape_.vocab * shape_.width * ElementSize())
                  .status());
    }
    heads::Submission submission;
    heads::SubmittedTerm& term = submission.terms.emplace_back();
    term.head = served_;
    term.head_epoch = served_->Describe().epoch;
    term.step = *served_->Describe().open_step;
    term.term = Term(0, shape_.rows);
    term.term.head = nullptr;
    submission.micro_batch = submitted_++;
    submission.backward = true;
    submission.hidden = {hidden_.get(), shape_.rows, shape_.width, shape_.type};
    submission.grad_hidden = {grad_hidden_.get(), shape_.rows, shape_.width, shape_.type};
    std::memcpy(submission.digest.data(), &*submission.micro_batch, sizeof(int64_t));  // rows are hashed before they come here
    Require(heads::CheckSubmission(submission));
    const heads::SubmissionOutcome outcome = Require(heads::Submit(submission, *engine_, [] { return false; }));
    ExpectPlausible(outcome.terms[0], term.term);
    if (outcome.form != heads::ContributionForm::kDirect) throw std::runtime_error("the micro-batch was not added in place");
  }

  const bool has_sums_;
  const Shape shape_;
  const std::string folder_;
  const Memory hidden_, grad_hidden_;
  Memory teacher_hidden_, weight_, teacher_weight_, valid_targets_;
  std::vector<int32_t> targets_, argmax_, top_k_ids_;
  std::vector<float> class_weights_, token_loss_, lse_, target_log_probability_, entropy_, mean_logits_, log_sum_sq_probs_;
  std::vector<float> token_weights_, entropy_factors_, lse_factors_, top_k_log_probs_;
  double resident_bytes_ = 0;
  double resolution_ = 0;
  std::atomic<uint64_t> seed_{0};  // each call has other draws
  int64_t update_count_ = 0, submitted_ = 0;
  LossEngine* engine_ = nullptr;
  std::unique_ptr<EngineHead> head_, teacher_;
  std::shared_ptr<heads::Head> served_;
  std::unique_ptr<Products> products_;
};

class EngineSide {
 public:
  explicit EngineSide(Request& arguments)
      : folder_(arguments.Take<std::string>("folder", "")), devices_(arguments.Take<size_t>("devices", 1)) {
    EngineOptions options;
    options.workspace_bytes = arguments.Take<int64_t>("workspace_mib", 0) << 20;
    options.algorithm_cache_path = arguments.Take<std::string>("algorithms", "");
    engines_ = MakeEngines(static_cast<int32_t>(devices_), options);
  }

  std::string Answer(Request& request) {
    const std::string& command = request.command();
    if (command == "machine") return DescribeMachine();
    if (command == "peak") return Words({ResidentBytes("VmHWM")});
    const std::string name = request.Take<std::string>("of", "");
    if (command == "load") return Load(name, Shape(request));
    if (command == "free") return Free(name);
    if (loaded_.count(name) == 0) throw std::runtime_error("nothing is loaded");
    const Loaded& loaded = loaded_[name];
    if (command == "resolution") {
      const double tau = request.Take<double>("tau", 0);
      for (const auto& problem : loaded.alone) problem->set_resolution(tau);
      return "";
    }
    const bool in_group = request.Take<bool>("in_group", false);
    const std::vector<std::unique_ptr<Problem>>& problems = in_group ? loaded.grouped : loaded.alone;
    if (problems.empty()) throw std::runtime_error("one device is no group");
    std::vector<double> results(devices_);
    if (command == "loss") {
      const bool grad_hidden = request.Take<bool>("grad_hidden", false), grad_weight = request.Take<bool>("grad_weight", false);
      OnEach([&](size_t rank) { results[rank] = problems[rank]->Loss(grad_hidden, grad_weight); });
      return Words(results);
    }
    const int64_t count = request.Take<int64_t>("count", 1);
    const double processor_start = ProcessorSeconds();
    const auto start = std::chrono::steady_clock::now();
    const auto ms = [&](std::chrono::steady_clock::time_point begin) {
      return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count() /
             static_cast<double>(count);
    };
    OnEach([&](size_t rank) {
      const auto own_start = std::chrono::steady_clock::now();
      problems[rank]->Run(command, count, static_cast<int32_t>(rank), in_group ? static_cast<int32_t>(devices_) : 1);
      Synchronize();
      results[rank] = ms(own_start);
    });
    const double all_ms = ms(start);
    if (devices_ == 1) results.clear();
    results.insert(results.begin(), {all_ms, 1000 * (ProcessorSeconds() - processor_start) / static_cast<double>(count)});
    return Words(results);
  }

 private:
  struct Loaded {
    std::vector<std::unique_ptr<Problem>> alone, grouped;  // by device
  };

  void OnEach(const std::function<void(size_t rank)>& work) {
    engines_->Run([&](int32_t rank) { work(static_cast<size_t>(rank)); });
  }

  std::string Load(const std::string& name, const Shape& shape) {
    Free(name);
    Loaded loaded;
    loaded.alone.resize(devices_);
    if (devices_ > 1) loaded.grouped.resize(devices_);
    OnEach([&](size_t index) {
      const auto rank = static_cast<int32_t>(index);
      const auto alone = [&]() -> LossEngine& { return engines_->alone(rank); };
      const auto grouped = [&]() -> LossEngine& { return engines_->grouped(rank); };
      loaded.alone[index] = std::make_unique<Problem>(alone, true, shape, folder_);
      const bool has_sums = rank == 0 || shape.step_micro_batches > 0;
      if (devices_ > 1) loaded.grouped[index] = std::make_unique<Problem>(grouped, has_sums, shape, folder_);
    });
    std::ofstream("/proc/self/clear_refs") << "5";  // VmHWM starts again from what is resident now
    const Problem& first = *(loaded_[name] = std::move(loaded)).alone[0];
    return Words({first.resident_bytes(), first.WorkspaceMib()});
  }

  std::string Free(const std::string& name) {
    Loaded& loaded = loaded_[name];
    OnEach([&](size_t rank) {
      if (!loaded.alone.empty()) loaded.alone[rank].reset();
      if (!loaded.grouped.empty()) loaded.grouped[rank].reset();
    });
    loaded_.erase(name);
    return "";
  }

  const std::string folder_;
  const size_t devices_;
  std::unique_ptr<Engines> engines_;
  std::map<std::string, Loaded> loaded_;
};

int Main(int argc, char** argv) {
  return Serve(argc, argv, [](Request& arguments) {
    return [side = std::make_shared<EngineSide>(arguments)](Request& request) { return side->Answer(request); };
  });
}

}  // namespace
}  // namespace headwater::bench

int main(int argc, char** argv) { return headwater::bench::Main(argc, argv); }
