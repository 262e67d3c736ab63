// NCCL as it is played: process groups of cards whose bytes go over Gloo, under the laws that NCCL has.
//
// A communicator is made when a first call needs it, has a stream of its own, and takes its calls in the same order on
// all its ranks: before anything is sent, each rank tells the others what it is at, and where these differ both are named.
#include <torch/csrc/utils/pybind.h>

#include "card.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iostream>
#include <map>
#include <set>
#include <thread>
#include <unistd.h>

namespace card {

namespace {

using at::Tensor;
using c10::intrusive_ptr;
using c10d::Backend;
using c10d::Work;
using std::chrono::milliseconds;

constexpr int HEAD = 1024;              // bytes of what a rank tells of a call
constexpr milliseconds GRACE{500};      // in which somebody may abort a broken communicator, before the process is ended

const std::set<c10::ScalarType> TYPES{
    at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong, at::kChar, at::kByte, at::kBool,
    at::kFloat8_e4m3fn, at::kFloat8_e5m2};

// The bytes of a tensor of a card as the host sees them.
Tensor bytes_of(const Tensor& of) {
  char* start = static_cast<char*>(of.storage().mutable_data()) + of.storage_offset() * std::int64_t(of.itemsize());
  return at::from_blob(start, {std::int64_t(of.nbytes())}, at::kByte);
}

Tensor on_host(const Tensor& of) {
  char* start = static_cast<char*>(of.storage().mutable_data()) + of.storage_offset() * std::int64_t(of.itemsize());
  return at::from_blob(start, of.sizes(), at::TensorOptions().dtype(of.scalar_type()));
}

Region region_of(const Tensor& of) {
  Region made{static_cast<char*>(of.storage().mutable_data()) + of.storage_offset() * std::int64_t(of.itemsize()),
              of.sizes().vec(), of.strides().vec(), int(of.itemsize())};
  made.close();
  return made;
}

// One call of a communicator: what is told of it, what goes to each rank, and what is done with what came from each.
struct Asked {
  std::string kind;      // alike on all ranks
  std::string expected;  // of the others: the same, or the other half of a send
  std::string line;
  std::vector<Tensor> to;    // by rank of the communicator; undefined: nothing
  std::vector<Tensor> from;  // room for what comes, likewise
  std::function<void()> then;
  std::vector<Tensor> spoilt;  // where no results come: bytes of the host, as all here; nothing keeps memory of the card
};

class Communicator {
 public:
  const int rank, size, device, stream;
  const std::string name;
  std::atomic<bool> aborted{false}, closed{false};
  milliseconds timeout;

  Communicator(std::string name, int rank, int size, int device, intrusive_ptr<Backend> gloo, milliseconds timeout)
      : rank(rank), size(size), device(device), stream(taken(device)), name(std::move(name)), timeout(timeout), gloo_(std::move(gloo)) {
    std::thread([this] { drive(); }).detach();  // it lives as long as the process
  }

  // What the stream does when it comes to a call. Without the lock.
  void run(const Asked& of) {
    if (aborted) return spoil(of);
    try {
      swap_heads(of);
      swap(of.to, of.from, 1);
      if (of.then) of.then();
    } catch (const Differs& error) {
      aborted = true;
      spoil(of);
      Held held;
      failed(error.what());
    } catch (const std::exception& error) {
      broke(of, error.what());
    }
  }

  void abort() {
    aborted = true;
    std::lock_guard<std::mutex> held(mine_);
    for (auto& each : works_) each->abort();
  }

 private:
  struct Differs : std::runtime_error {
    using std::runtime_error::runtime_error;
  };

  static int taken(int device) {
    Held held;
    counts().communicators++;
    return new_stream(device, false);
  }

  // As the card does: by itself, a little later.
  void drive() {
    std::unique_lock<std::mutex> held(lock());
    while (!closed) {
      Queue& of = queue(stream);
      if (of.done == of.launched) {
        changed().wait(held);
        continue;
      }
      held.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(50 * (1 + of.launched % 7)));
      held.lock();
      if (of.done < of.launched) advance(stream, of.done + 1);
    }
  }

  void swap_heads(const Asked& of) {
    Tensor mine = at::zeros({HEAD}, at::kByte);
    std::string said = of.kind + "\n" + of.line;
    std::memcpy(mine.data_ptr(), said.data(), std::min<std::size_t>(said.size(), HEAD - 1));
    std::vector<Tensor> to(std::size_t(size), mine), from;
    for (int k = 0; k < size; k++) from.push_back(at::zeros({HEAD}, at::kByte));
    swap(to, from, 0);
    for (int k = 0; k < size; k++) {
      if (k == rank) continue;
      std::string theirs = static_cast<const char*>(from[std::size_t(k)].data_ptr());
      std::string kind = theirs.substr(0, theirs.find('\n')), line = theirs.substr(theirs.find('\n') + 1);
      if (kind != of.expected)
        throw Differs("NCCL, communicator " + name + ": rank " + std::to_string(rank) + " is at " + of.kind + " (" + of.line
                      + "), rank " + std::to_string(k) + " at " + kind + " (" + line + ")");
    }
  }

  // Bytes to and from each of the others, all at once.
  void swap(const std::vector<Tensor>& to, const std::vector<Tensor>& from, int tag) {
    std::vector<intrusive_ptr<Work>> works;
    auto posted = [&](intrusive_ptr<Work> work) {
      std::lock_guard<std::mutex> held(mine_);
      works.push_back(work);
      works_.push_back(work);
    };
    for (int k = 0; k < size; k++) {
      if (k == rank) continue;
      std::vector<Tensor> one;
      if (std::size_t(k) < to.size() && to[std::size_t(k)].defined() && to[std::size_t(k)].numel()) {
        one = {to[std::size_t(k)]};
        posted(gloo_->send(one, k, tag));
      }
      if (std::size_t(k) < from.size() && from[std::size_t(k)].defined() && from[std::size_t(k)].numel()) {
        one = {from[std::size_t(k)]};
        posted(gloo_->recv(one, k, tag));
      }
    }
    for (auto& each : works) {
      each->wait(timeout);
      TORCH_CHECK(!aborted, "aborted");
    }
    std::lock_guard<std::mutex> held(mine_);
    works_.clear();
  }

  // Results that never came are no numbers.
  static void spoil(const Asked& of) {
    for (const Tensor& each : of.spoilt) std::memset(each.data_ptr(), 0xff, each.nbytes());
  }

  // A peer that is gone or late. Torch's watchdog ends the process, where nobody aborts the communicator first.
  void broke(const Asked& of, const std::string& why) {
    spoil(of);
    for (auto waited = milliseconds(0); waited < GRACE && !aborted && !closed; waited += milliseconds(10))
      std::this_thread::sleep_for(milliseconds(10));
    if (aborted || closed) return;
    std::cerr << "[rank " << rank << "] Watchdog caught an error of NCCL (played), communicator " << name << ", in " << of.kind
              << " (" << of.line << "): " << why.substr(0, 300) << "\nThe process is taken down.\n";
    _exit(134);
  }

  intrusive_ptr<Backend> gloo_;
  std::mutex mine_;
  std::vector<intrusive_ptr<Work>> works_;
};

// A call that was made. Who waits for it has its stream wait, or itself where it gives a limit.
class Playing final : public Work {
 public:
  Playing(int rank, c10d::OpType type, Communicator* of, Event end, std::vector<Tensor> kept)
      : Work(rank, type), of_(of), end_(std::move(end)), kept_(std::move(kept)) {}
  ~Playing() override {
    if (kept_.empty()) return;
    Held held;  // nobody waited: their memory may be used until the call has ended
    for (const Tensor& each : kept_) record_use(each.storage().data(), of_->stream);
  }
  bool isCompleted() override {
    Held held;
    return queue(of_->stream).done >= end_.time;
  }
  bool isSuccess() const override { return !of_->aborted; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(milliseconds limit) override {
    auto until = std::chrono::steady_clock::now() + limit;
    while (limit != kNoTimeout && !isCompleted()) {
      if (std::chrono::steady_clock::now() > until) {
        of_->abort();
        TORCH_CHECK_WITH(DistBackendError, false, "NCCL (played), communicator ", of_->name, ": Timeout");
      }
      std::this_thread::sleep_for(milliseconds(1));
    }
    {
      Held held;
      card::wait(current_stream(of_->device), end_);
    }
    kept_.clear();
    return true;
  }
  std::vector<Tensor> result() override { return kept_; }

 private:
  Communicator* of_;
  Event end_;
  std::vector<Tensor> kept_;
};

// The calls of a batch, which are waited for as one.
class Batch final : public Work {
 public:
  Batch(int rank, std::vector<intrusive_ptr<Work>> works) : Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}
  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](auto& each) { return each->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](auto& each) { return each->isSuccess(); });
  }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(milliseconds limit) override {
    for (auto& each : works_) each->wait(limit);
    return true;
  }

 private:
  std::vector<intrusive_ptr<Work>> works_;
};

std::function<intrusive_ptr<Backend>(intrusive_ptr<c10d::Store>, std::string, int, int, int, milliseconds)>& connect() {
  static auto* of = new std::function<intrusive_ptr<Backend>(intrusive_ptr<c10d::Store>, std::string, int, int, int, milliseconds)>();
  return *of;
}

struct Options final : Backend::Options {
  Options() : Backend::Options("nccl") {}
  bool is_high_priority_stream = false;
};

class Nccl final : public Backend {
 public:
  Nccl(intrusive_ptr<c10d::Store> store, int rank, int size, intrusive_ptr<Options> options)
      : Backend(rank, size), store_(std::move(store)), options_(std::move(options)) {}
  ~Nccl() override { shutdown(); }

  const std::string getBackendName() const override { return "nccl"; }
  intrusive_ptr<Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(milliseconds timeout) override {
    options_->timeout = timeout;
    std::lock_guard<std::mutex> held(mine_);
    for (auto& [key, each] : made_) each->timeout = timeout;
  }
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return calls_; }

  void abort() override {
    aborted_ = true;
    std::lock_guard<std::mutex> held(mine_);
    for (auto& [key, each] : made_) each->abort();
  }
  void shutdown() override {
    std::lock_guard<std::mutex> held(mine_);
    for (auto& [key, each] : made_) each->closed = true;
    made_.clear();  // their threads have them
    Held all;
    changed().notify_all();
  }

  intrusive_ptr<Work> allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    Tensor x = only(tensors);
    auto asked = std::make_shared<Asked>();
    auto pieces = everybody(*asked, x);
    asked->kind = said("all_reduce", x) + " " + named(options.reduceOp);
    asked->then = [pieces, at = on_host(x), op = options.reduceOp, size = size_] { at.copy_(reduced(pieces, at, op, size)); };
    return enqueue(whole(x), c10d::OpType::ALLREDUCE, asked, {x}, {x});
  }

  intrusive_ptr<Work> _allgather_base(Tensor& out, Tensor& x, const c10d::AllgatherOptions&) override {
    checked(out);
    checked(x);
    TORCH_CHECK(out.numel() == x.numel() * size_ && out.scalar_type() == x.scalar_type(),
                "output tensor size must be equal to world_size times input tensor size");
    auto asked = std::make_shared<Asked>();
    auto pieces = everybody(*asked, x);
    asked->kind = said("all_gather", x);
    asked->then = [pieces, all = bytes_of(out)] { at::cat_out(const_cast<Tensor&>(all), pieces); };
    return enqueue(whole(x), c10d::OpType::_ALLGATHER_BASE, asked, {x}, {out});
  }

  intrusive_ptr<Work> _reduce_scatter_base(Tensor& out, Tensor& x, const c10d::ReduceScatterOptions& options) override {
    checked(out);
    checked(x);
    TORCH_CHECK(x.numel() == out.numel() * size_ && out.scalar_type() == x.scalar_type(),
                "input tensor must be the same size as output size times world size");
    auto asked = std::make_shared<Asked>();
    auto pieces = everybody(*asked, x);
    asked->kind = said("reduce_scatter", x) + " " + named(options.reduceOp);
    asked->then = [pieces, own = on_host(x), at = on_host(out).reshape(-1), op = options.reduceOp, size = size_, rank = rank_] {
      at.copy_(reduced(pieces, own, op, size).reshape(-1).narrow(0, rank * at.numel(), at.numel()));
    };
    return enqueue(whole(x), c10d::OpType::_REDUCE_SCATTER_BASE, asked, {x}, {out});
  }

  intrusive_ptr<Work> alltoall_base(Tensor& out, Tensor& x, std::vector<std::int64_t>& outs, std::vector<std::int64_t>& ins,
                                    const c10d::AllToAllOptions&) override {
    checked(out);
    checked(x);
    auto asked = std::make_shared<Asked>();
    Tensor from = bytes_of(x), into = bytes_of(out);
    split(from, ins, x, asked->to);
    split(into, outs, out, asked->from);
    asked->kind = "all_to_all of " + std::string(c10::toString(x.scalar_type()));
    Tensor own = asked->to[std::size_t(rank_)], place = asked->from[std::size_t(rank_)];
    TORCH_CHECK(own.numel() == place.numel(), "a rank keeps as much as it gives itself");
    asked->then = [=] { place.copy_(own); };
    return enqueue(whole(x), c10d::OpType::ALLTOALL_BASE, asked, {x}, {out});
  }

  intrusive_ptr<Work> broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    Tensor x = only(tensors);
    int root = int(options.rootRank);
    auto asked = std::make_shared<Asked>();
    asked->kind = said("broadcast", x) + " from " + std::to_string(root);
    asked->to.resize(std::size_t(size_));
    asked->from.resize(std::size_t(size_));
    std::vector<Tensor> given{x}, none;
    bool gives = rank_ == root;
    if (gives) asked->to.assign(std::size_t(size_), bytes_of(x));
    else asked->from[std::size_t(root)] = bytes_of(x);
    return enqueue(whole(x), c10d::OpType::BROADCAST, asked, gives ? given : none, gives ? none : given);
  }

  intrusive_ptr<Work> barrier(const c10d::BarrierOptions&) override {
    auto asked = std::make_shared<Asked>();
    asked->kind = "barrier";
    auto work = enqueue(communicator("all", rank_, size_, current_card()), c10d::OpType::BARRIER, asked, {}, {});
    work->wait();
    return work;
  }

  intrusive_ptr<Work> send(std::vector<Tensor>& tensors, int peer, int) override { return passed(only(tensors), peer, true); }
  intrusive_ptr<Work> recv(std::vector<Tensor>& tensors, int peer, int) override { return passed(only(tensors), peer, false); }

  // Sends and receives of a batch are made at once, by the communicator of all ranks: each has to come where it is made.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { together_ = std::make_unique<std::map<int, Pair>>(); }
  intrusive_ptr<Work> endCoalescing() override {
    auto batch = std::move(*together_);
    together_.reset();
    std::vector<intrusive_ptr<Work>> works;
    for (auto& [peer, pair] : batch) {
      whole(pair.to.defined() ? pair.to : pair.from);
      works.push_back(exchanged(pair, peer));
    }
    return c10::make_intrusive<Batch>(rank_, std::move(works));
  }

 private:
  // What goes to a peer and what comes from it.
  struct Pair {
    Tensor to, from;
  };

  static void checked(const Tensor& x) {
    TORCH_CHECK(x.is_cuda() && !x.is_sparse(), "Tensors must be CUDA and dense");
    TORCH_CHECK(x.is_contiguous(), "Tensors must be contiguous");
    TORCH_CHECK(TYPES.count(x.scalar_type()), "Input tensor data type is not supported for NCCL process group: ", x.scalar_type());
  }
  static Tensor only(const std::vector<Tensor>& tensors) {
    TORCH_CHECK(tensors.size() == 1, "Expecting one tensor only");
    checked(tensors[0]);
    return tensors[0];
  }
  static std::string said(const char* what, const Tensor& x) {
    return std::string(what) + " of " + std::to_string(x.numel()) + " " + c10::toString(x.scalar_type());
  }
  static std::string named(const c10d::ReduceOp& op) {
    using Op = c10d::ReduceOp;
    return op == Op::SUM ? "SUM" : op == Op::AVG ? "AVG" : op == Op::MAX ? "MAX" : op == Op::MIN ? "MIN" : op == Op::PRODUCT ? "PRODUCT" : "?";
  }

  // Whole tensors of all ranks come to each; the own one is read in place.
  std::vector<Tensor> everybody(Asked& of, const Tensor& x) {
    of.to.assign(std::size_t(size_), bytes_of(x));
    std::vector<Tensor> pieces;
    for (int k = 0; k < size_; k++)
      pieces.push_back(k == rank_ ? bytes_of(x) : at::empty({std::int64_t(x.nbytes())}, at::kByte));
    of.from = pieces;
    return pieces;
  }
  static Tensor reduced(const std::vector<Tensor>& pieces, const Tensor& x, const c10d::ReduceOp& op, int size) {
    using Op = c10d::ReduceOp;
    Tensor all;
    for (const Tensor& piece : pieces) {
      Tensor one = at::from_blob(piece.data_ptr(), x.sizes(), at::TensorOptions().dtype(x.scalar_type()));
      if (!all.defined()) all = one.clone();
      else if (op == Op::SUM || op == Op::AVG) all.add_(one);
      else if (op == Op::MAX) all = at::maximum(all, one);
      else if (op == Op::MIN) all = at::minimum(all, one);
      else if (op == Op::PRODUCT) all.mul_(one);
      else TORCH_CHECK(false, "this reduction is not played");
    }
    if (op == Op::AVG) all.div_(size);
    return all;
  }
  void split(const Tensor& bytes, const std::vector<std::int64_t>& sizes, const Tensor& of, std::vector<Tensor>& into) const {
    TORCH_CHECK(sizes.empty() || std::int64_t(sizes.size()) == size_, "Number of tensor splits not equal to group size");
    std::int64_t row = of.dim() && of.size(0) ? std::int64_t(of.nbytes()) / of.size(0) : 0, at = 0;
    for (int k = 0; k < size_; k++) {
      std::int64_t numel = sizes.empty() ? std::int64_t(of.nbytes()) / size_ : sizes[std::size_t(k)] * row;
      into.push_back(bytes.narrow(0, at, numel));
      at += numel;
    }
    TORCH_CHECK(at == bytes.numel(), "Split sizes doesn't match total dim 0 size");
  }

  Communicator* whole(const Tensor& x) { return communicator("all", rank_, size_, x.device().index()); }

  intrusive_ptr<Work> passed(const Tensor& x, int peer, bool sends) {
    TORCH_CHECK(peer != rank_ && peer >= 0 && peer < size_, "Invalid destination or source rank ", peer);
    if (!together_) return exchanged(sends ? Pair{x, {}} : Pair{{}, x}, peer);
    Tensor& place = sends ? (*together_)[peer].to : (*together_)[peer].from;
    TORCH_CHECK(!place.defined(), "two messages of a batch to one peer are not played");
    place = x;
    return nullptr;
  }

  // Two ranks that send to each other have a communicator for that.
  intrusive_ptr<Work> exchanged(const Pair& pair, int peer) {
    int low = std::min(rank_, peer), own = rank_ > peer, other = 1 - own;
    auto asked = std::make_shared<Asked>();
    std::string to = pair.to.defined() ? said("send", pair.to) : "", from = pair.from.defined() ? said("receive", pair.from) : "";
    std::string back = pair.from.defined() ? said("send", pair.from) : "", forth = pair.to.defined() ? said("receive", pair.to) : "";
    asked->kind = to.empty() || from.empty() ? to + from : to + ", " + from;
    asked->expected = to.empty() || from.empty() ? back + forth : back + ", " + forth;
    asked->to.resize(2);
    asked->from.resize(2);
    std::vector<Tensor> reads, writes;
    if (pair.to.defined()) asked->to[std::size_t(other)] = bytes_of(pair.to), reads.push_back(pair.to);
    if (pair.from.defined()) asked->from[std::size_t(other)] = bytes_of(pair.from), writes.push_back(pair.from);
    std::string key = std::to_string(low) + ":" + std::to_string(std::max(rank_, peer));
    auto* of = communicator(key, own, 2, (reads.empty() ? writes : reads)[0].device().index());
    return enqueue(of, reads.empty() ? c10d::OpType::RECV : c10d::OpType::SEND, asked, reads, writes);
  }

  Communicator* communicator(const std::string& key, int rank, int size, int device) {
    TORCH_CHECK_WITH(DistBackendError, !aborted_, "NCCL communicator was aborted on rank ", rank_, ".");
    std::string name = key + " of cuda:" + std::to_string(device);
    std::unique_lock<std::mutex> held(mine_);
    if (auto found = made_.find(name); found != made_.end()) return found->second;
    held.unlock();
    auto gloo = connect()(store_, key, rank, size, device, options_->timeout);
    held.lock();
    return made_[name] = new Communicator(name, rank, size, device, std::move(gloo), options_->timeout);
  }

  intrusive_ptr<Work> enqueue(Communicator* of, c10d::OpType type, std::shared_ptr<Asked> asked, const std::vector<Tensor>& reads,
                              const std::vector<Tensor>& writes) {
    if (asked->expected.empty()) asked->expected = asked->kind;
    std::vector<Tensor> kept = reads;
    kept.insert(kept.end(), writes.begin(), writes.end());
    for (const Tensor& each : kept)
      TORCH_CHECK(each.device().index() == of->device, "a tensor on ", each.device(), " for communicator ", of->name);
    for (const Tensor& each : writes) asked->spoilt.push_back(bytes_of(each));
    asked->line = here(asked->kind);
    calls_++;
    Held held;
    raise_found();
    counts().launched++;
    counts().collectives++;
    card::wait(of->stream, record(current_stream(of->device)));
    Time time = launch(of->stream, [of, asked] { of->run(*asked); }, true);
    for (auto& [tensors, written] : {std::pair{&reads, false}, std::pair{&writes, true}})
      for (const Tensor& each : *tensors) {
        std::string race = used(region_of(each), written, of->stream, time, asked->line);
        TORCH_CHECK(race.empty(), race);
      }
    return c10::make_intrusive<Playing>(rank_, type, of, record(of->stream), std::move(kept));
  }

  intrusive_ptr<c10d::Store> store_;
  intrusive_ptr<Options> options_;
  std::atomic<bool> aborted_{false};
  std::atomic<std::uint64_t> calls_{0};
  std::mutex mine_;
  std::map<std::string, Communicator*> made_;
  std::unique_ptr<std::map<int, Pair>> together_;  // while a batch is told
};

}  // namespace

}  // namespace card

PYBIND11_MODULE(played_nccl, module) {
  namespace py = pybind11;
  using namespace card;
  py::module_::import("torch._C._distributed_c10d");
  auto nccl = py::class_<Nccl, c10::intrusive_ptr<Nccl>, c10d::Backend>(module, "ProcessGroupNCCL");
  py::class_<Options, c10::intrusive_ptr<Options>, c10d::Backend::Options>(nccl, "Options", py::dynamic_attr())
      .def(py::init([](bool high) {
             auto made = c10::make_intrusive<Options>();
             made->is_high_priority_stream = high;
             return made;
           }), py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &Options::is_high_priority_stream);
  nccl.def(py::init([](c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<Options> options) {
             return c10::make_intrusive<Nccl>(std::move(store), rank, size, std::move(options));
           }), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"))
      .def("abort", &Nccl::abort, py::call_guard<py::gil_scoped_release>())
      .def("_shutdown", &Nccl::shutdown, py::call_guard<py::gil_scoped_release>())
      .def("_set_default_timeout", &Nccl::setTimeout, py::call_guard<py::gil_scoped_release>());
  module.def("connect_by", [](py::function way) {
    auto* kept = new py::function(std::move(way));
    connect() = [kept](c10::intrusive_ptr<c10d::Store> store, std::string key, int rank, int size, int device, milliseconds timeout) {
      py::gil_scoped_acquire python;
      return (*kept)(store, key, rank, size, device, timeout).cast<c10::intrusive_ptr<c10d::Backend>>();
    };
  });
}
