// Graphs: begin, end, replay; what may not be done meanwhile.
#include "capture.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <random>

namespace card {

namespace {

std::atomic<int> under_way{0};
Graph* current = nullptr;

std::map<std::int64_t, std::unique_ptr<Graph>>& graphs() {
  static auto* all = new std::map<std::int64_t, std::unique_ptr<Graph>>();
  return *all;
}

std::map<std::int64_t, std::weak_ptr<Pool>>& pools() {
  static auto* all = new std::map<std::int64_t, std::weak_ptr<Pool>>();
  return *all;
}

std::mt19937& die() {
  static auto* of = new std::mt19937(unsigned(std::getenv("PLAYED_SEED") ? std::atoi(std::getenv("PLAYED_SEED")) : 0));
  return *of;
}

// Every node behind those that it comes after, and else in any order.
std::vector<int> an_order(const std::vector<Graph::Node>& nodes) {
  std::vector<std::vector<int>> next(nodes.size());
  std::vector<int> left(nodes.size()), ready, order;
  for (int k = 0; k < int(nodes.size()); k++) {
    left[k] = int(nodes[k].after.size());
    for (int before : nodes[k].after) next[before].push_back(k);
    if (!left[k]) ready.push_back(k);
  }
  while (!ready.empty()) {
    std::size_t at = die()() % ready.size();
    int node = ready[at];
    ready.erase(ready.begin() + std::ptrdiff_t(at));
    order.push_back(node);
    for (int k : next[node])
      if (!--left[k]) ready.push_back(k);
  }
  return order;
}

// Whether all that was recorded comes before what the first stream would do next.
bool joined(const Graph& of) {
  std::vector<bool> seen(of.nodes->size());
  std::vector<int> open = of.ends.at(of.origin);
  std::size_t found = 0;
  while (!open.empty()) {
    int node = open.back();
    open.pop_back();
    if (seen[node]) continue;
    seen[node] = true;
    found++;
    open.insert(open.end(), (*of.nodes)[node].after.begin(), (*of.nodes)[node].after.end());
  }
  return found == seen.size();
}

void let_go(Graph& of) {
  for (auto& [stream, knew] : of.knew) {
    Queue& each = queue(stream);
    each.records = nullptr;
    knew.learn(stream, each.launched);
    each.knows = knew;
    host().learn(stream, each.launched);  // nothing of it has run, so nobody need wait for it
  }
  current = nullptr;
  under_way = 0;
}

}  // namespace

Graph* recording() { return current; }
Graph* recording(int stream) { return queue(stream).records; }

void join(Graph& graph, int stream) {
  Queue& of = queue(stream);
  if (of.records) return;
  graph.knew[stream] = of.knows;
  graph.ends[stream];
  of.records = &graph;
  for (int k = 0; k < cards() * STREAMS; k++)
    if (!queue(k).records) of.knows.learn(k, queue(k).launched);  // what is recorded does not run beside these
}

void add(Graph& graph, int stream, std::function<void()> run) {
  TORCH_CHECK(run, "played card: an op whose result's shape is in its values cannot be recorded in a graph");
  auto& ends = graph.ends[stream];
  graph.nodes->push_back({std::move(run), ends});
  ends = {int(graph.nodes->size()) - 1};
}

void refuse_recorded(const std::string& what) {
  if (!under_way) return;
  std::string line = here(what);
  std::lock_guard<std::mutex> held(lock());
  if (!current || (current->mode && current->by != std::this_thread::get_id())) return;
  current->broken = line;
  TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing (played card: ", line, ")");
}

void refuse_sync(const std::string& line) {
  if (!current || (current->mode && current->by != std::this_thread::get_id())) return;
  current->broken = line;
  TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing (played card: ", line, ")");
}

}  // namespace card

// For Python's ctypes. What went wrong is told as a text.
using namespace card;

namespace {

thread_local std::string told;

const char* tell(std::string what) {
  told = std::move(what);
  return told.c_str();
}

Graph* found(std::int64_t which) {
  auto at = graphs().find(which);
  return at == graphs().end() ? nullptr : at->second.get();
}

}  // namespace

extern "C" {

std::int64_t card_graph_made() {
  static std::int64_t count = 0;
  Held held;
  graphs()[++count] = std::make_unique<Graph>();
  return count;
}

const char* card_graph_begin(std::int64_t which, std::int64_t pool, int mode) {
  Held held;
  Graph& of = *found(which);
  int card = current_card(), stream = current_stream(card);
  if (current) return tell("a graph is being recorded already");
  if (stream % STREAMS == 0) return tell("CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them on the default stream.)");
  if (!of.nodes->empty()) return tell("This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance.");
  of.origin = stream;
  of.card = card;
  of.mode = mode;
  of.by = std::this_thread::get_id();
  of.pool = pools()[pool].lock();
  if (!of.pool) pools()[pool] = of.pool = std::make_shared<Pool>();
  graph_draws(of, draws_of(c10::DeviceIndex(card)));
  for (auto& start : of.starts) start->drawn = 0;
  current = &of;
  under_way = 1;
  join(of, stream);
  return nullptr;
}

const char* card_graph_end(std::int64_t which) {
  Held held;
  Graph& of = *found(which);
  if (current != &of) return tell("this graph is not being recorded");
  bool whole = joined(of);
  let_go(of);
  of.over = true;
  if (!of.broken.empty()) return tell("CUDA error: operation failed due to a previous error during capture (played card: " + of.broken + ")");
  if (!whole) return tell("CUDA error: capturing stream has unjoined work (played card)");
  return nullptr;
}

const char* card_graph_replay(std::int64_t which) {
  Held held;
  Graph& of = *found(which);
  if (current) return tell("played card: a graph is replayed while one is recorded");
  if (!of.over || !of.broken.empty()) return tell("Called CUDAGraph::replay without a preceding successful capture.");
  for (auto& use : of.uses)
    if (!use.own && card_of(use.region.start) < 0 && !pinned(use.region.start))
      return tell("played card: a graph is replayed, and memory that it uses was freed since (" + use.line + ")");
  std::vector<Start> starts;
  for (auto& start : of.starts) starts.push_back(drawn_on(*start));
  int stream = current_stream(of.card);
  counts().replays++;
  auto run = [nodes = of.nodes, kept = of.starts, starts] {
    for (std::size_t k = 0; k < kept.size(); k++) kept[k]->seed = starts[k].seed, kept[k]->offset = starts[k].offset;
    for (int k : an_order(*nodes)) (*nodes)[k].run();
  };
  Time time = launch(stream, std::move(run));
  for (auto& use : of.uses) {
    std::string race = used(use.region, use.writes, stream, time, use.line + ", in a graph");
    if (!race.empty()) return tell(race);
  }
  roll();
  return nullptr;
}

void card_graph_gone(std::int64_t which) {
  std::unique_ptr<Graph> of;  // memory goes when the lock is not held
  Held held;
  auto at = graphs().find(which);
  if (at == graphs().end()) return;
  if (current == at->second.get()) let_go(*current);
  of = std::move(at->second);
  graphs().erase(at);
  of.reset();
}

void card_graph_draws(std::int64_t which, std::int64_t generator) {
  Held held;
  auto* impl = reinterpret_cast<c10::GeneratorImpl*>(generator);
  graph_draws(*found(which), at::Generator(c10::intrusive_ptr<c10::GeneratorImpl>::reclaim_copy(impl)));
}

int card_recording() {
  Held held;
  return recording(current_stream(current_card())) != nullptr;
}
}
