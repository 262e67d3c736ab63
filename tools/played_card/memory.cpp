// Memory of cards and pinned memory of the host: blocks that are used again at once, and who used which bytes when.
#include "capture.h"

#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

namespace card {

namespace {

constexpr std::int64_t GRAIN = 512;      // as CUDA's allocator rounds
constexpr std::int64_t EXACT = 1 << 16;  // so many elements are looked at one by one where rows of two views alternate

struct Use {
  Region region;
  bool writes;
  int stream;
  Time time;
  std::string line;
};

struct Block {
  std::int64_t bytes = 0;
  int card = -1;    // -1: pinned memory of the host
  int stream = -1;  // on which it was asked for
  Pool* pool = nullptr;  // of a graph that it is for
  bool last = false;     // it was of one that is gone, and goes too
  std::vector<Use> uses;
  std::set<int> recorded;                            // streams that it was said to be used on
  std::vector<std::pair<int, Time>> until;           // of a freed one: what has to be done before it is given again
};

std::map<char*, Block>& blocks() {  // those in use, by their first byte
  static auto* all = new std::map<char*, Block>();
  return *all;
}

std::map<std::pair<int, std::int64_t>, std::vector<char*>>& idle() {  // by stream (-1: pinned) and size
  static auto* all = new std::map<std::pair<int, std::int64_t>, std::vector<char*>>();
  return *all;
}

std::vector<std::pair<char*, Block>>& leaving() {  // freed, and recorded on streams that are not done with them
  static auto* all = new std::vector<std::pair<char*, Block>>();
  return *all;
}

std::vector<std::string>& found() {  // races that could not be raised where they were seen
  static auto* all = new std::vector<std::string>();
  return *all;
}

std::pair<char* const, Block>* block_of(const void* data) {
  auto at = blocks().upper_bound(static_cast<char*>(const_cast<void*>(data)));
  if (at == blocks().begin()) return nullptr;
  --at;
  return data < at->first + at->second.bytes ? &*at : nullptr;
}

std::string said(int stream) {
  c10::Stream of = stream_of(stream);
  return "stream " + std::to_string(of.id()) + " of cuda:" + std::to_string(of.device_index());
}

// Bytes of a freed block become NaN, in the order of the stream that may have them again.
void poison(char* start, const Block& block) {
  auto run = [start, bytes = block.bytes] { std::memset(start, 0xff, bytes); };
  Queue& of = queue(block.stream);
  Graph* graph = of.records;
  if (!block.pool) of.records = nullptr;  // what is not the graph's is freed once
  launch(block.stream, run);
  of.records = graph;
}

void settle() {
  auto is_done = [](const std::pair<int, Time>& use) { return queue(use.first).done >= use.second; };
  auto& all = leaving();
  for (std::size_t k = 0; k < all.size();) {
    auto& [start, block] = all[k];
    if (!std::all_of(block.until.begin(), block.until.end(), is_done)) {
      k++;
      continue;
    }
    if (block.last) {
      c10::free_cpu(start);
      counts().reserved -= block.bytes;
    } else {
      std::memset(start, 0xff, block.bytes);
      idle()[{block.stream, block.bytes}].push_back(start);
    }
    all.erase(all.begin() + std::ptrdiff_t(k));
  }
}

void* take(std::int64_t bytes, int card, int stream) {
  bytes = (bytes + GRAIN - 1) / GRAIN * GRAIN;
  settle();
  Graph* graph = card >= 0 ? recording(stream) : nullptr;
  Pool* pool = graph ? graph->pool.get() : nullptr;
  auto& free = (pool ? pool->idle : idle())[{stream, bytes}];
  char* start;
  if (free.empty()) {
    start = static_cast<char*>(c10::alloc_cpu(std::size_t(bytes)));
    std::memset(start, 0xff, bytes);
    if (pool) pool->all.push_back(start);
    if (card >= 0) counts().reserved += bytes;
  } else {
    start = free.back();
    free.pop_back();
  }
  blocks()[start] = Block{bytes, card, stream, pool};
  if (card >= 0) {
    counts().allocations++;
    counts().allocated += bytes;
    counts().peak = std::max(counts().peak, counts().allocated);
  }
  return start;
}

// Whose use of a freed block nothing orders before what its own stream does next with it.
const Use* still_used(const Block& block) {
  Queue& home = queue(block.stream);
  for (const Use& use : block.uses) {
    bool ordered = home.knows.has(use.stream, use.time) || host().has(use.stream, use.time);
    if (!ordered && !block.recorded.count(use.stream)) return &use;
  }
  return nullptr;
}

// Memory of a card: given again at once on its own stream, and behind what others were said to do with it.
std::string give_card(char* start, Block block) {
  std::string race;
  counts().allocated -= block.bytes;
  Graph* graph = block.pool ? recording(block.stream) : nullptr;
  if (block.pool && !(graph && graph->pool.get() == block.pool)) {  // it is the graph's as long as that is there
    block.pool->idle[{block.stream, block.bytes}].push_back(start);
    return "";
  }
  if (const Use* use = still_used(block)) {
    counts().races++;
    race = ", and nothing says that " + said(use->stream) + " is done with it, which "
           + (use->writes ? "writes" : "reads") + " it (" + use->line + "). Tensor.record_stream, or a wait, says it";
  }
  for (int stream : block.recorded)
    if (stream != block.stream) block.until.emplace_back(stream, queue(stream).launched);
  if (graph) {
    if (!block.until.empty()) return race;  // in a graph nobody is told when the other stream is done
    poison(start, block);
    block.pool->idle[{block.stream, block.bytes}].push_back(start);
    return race;
  }
  if (block.until.empty()) {
    poison(start, block);
    idle()[{block.stream, block.bytes}].push_back(start);
  } else {
    block.until.emplace_back(block.stream, queue(block.stream).launched);
    leaving().emplace_back(start, std::move(block));
  }
  return race;
}

// CUDA's allocator of pinned memory waits for the copies that it knows of, which are all that are made here.
void give_pinned(char* start, Block block) {
  for (Use& use : block.uses) block.until.emplace_back(use.stream, use.time);
  leaving().emplace_back(start, std::move(block));
}

void give(void* data) {
  if (!data) return;
  char* start = static_cast<char*>(data);
  std::string race;
  int stream;
  {
    Held held;
    Block block = std::move(blocks()[start]);
    blocks().erase(start);
    stream = block.stream;
    if (block.card < 0) return give_pinned(start, std::move(block));
    race = give_card(start, std::move(block));
  }
  if (race.empty()) return;
  std::string line = here("memory of " + said(stream) + " is freed");
  Held held;
  found().push_back("played card: " + line + race);
}

struct Memory final : c10::Allocator {
  bool of_cards;
  explicit Memory(bool of_cards) : of_cards(of_cards) {}
  c10::DataPtr allocate(std::size_t bytes) override {
    Held held;
    int card = of_cards ? current_card() : -1;
    void* data = bytes ? take(std::int64_t(bytes), card, of_cards ? current_stream(card) : -1) : nullptr;
    c10::Device device = of_cards ? c10::Device(c10::DeviceType::CUDA, c10::DeviceIndex(card)) : c10::DeviceType::CPU;
    return {data, data, &give, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

// The first bytes of all elements of a region, in order.
std::vector<char*> elements(const Region& of) {
  std::vector<char*> all{of.start};
  for (std::size_t d = 0; d < of.sizes.size(); d++) {
    std::vector<char*> more;
    for (char* at : all)
      for (std::int64_t k = 0; k < of.sizes[d]; k++) more.push_back(at + k * of.strides[d] * of.element);
    all = std::move(more);
  }
  std::sort(all.begin(), all.end());
  return all;
}

std::int64_t count(const Region& of) {
  std::int64_t all = 1;
  for (auto size : of.sizes) all *= size;
  return all;
}

}  // namespace

void Region::close() {
  low = high = start;
  std::int64_t all = 1, last = 0;
  for (std::size_t d = 0; d < sizes.size(); d++) {
    all *= sizes[d];
    last += (sizes[d] - 1) * strides[d];
  }
  if (!all) return;
  high = start + (last + 1) * element;
  dense = high - low == all * element;
}

bool Region::meets(const Region& other) const {
  if (low >= other.high || other.low >= high) return false;
  if ((dense && other.dense) || count(*this) > EXACT || count(other) > EXACT) return true;
  std::vector<char*> one = elements(*this), two = elements(other);
  for (std::size_t a = 0, b = 0; a < one.size() && b < two.size();) {
    if (one[a] < two[b] + other.element && two[b] < one[a] + element) return true;
    one[a] < two[b] ? a++ : b++;
  }
  return false;
}

std::string used(const Region& region, bool writes, int stream, Time time, const std::string& line) {
  auto* home = region.low == region.high ? nullptr : block_of(region.start);
  if (!home) return "";
  auto& uses = home->second.uses;
  Queue& of = queue(stream);
  if (of.records) of.records->uses.push_back({region, writes, line, home->second.pool == of.records->pool.get()});
  for (Use& use : uses) {
    if (!(writes || use.writes) || of.knows.has(use.stream, use.time) || !use.region.meets(region)) continue;
    counts().races++;
    return "played card: " + line + ", " + (writes ? "writes" : "reads") + " on " + said(stream) + " what " + said(use.stream)
           + " " + (use.writes ? "writes" : "reads") + " (" + use.line + "), and nothing says which comes first";
  }
  // What all later tasks are behind anyway, since they are behind this one, need not be kept.
  auto is_past = [&](const Use& use) {
    bool within = region.dense && region.low <= use.region.low && use.region.high <= region.high;
    return host().has(use.stream, use.time) || (within && (writes || !use.writes) && of.knows.has(use.stream, use.time));
  };
  uses.erase(std::remove_if(uses.begin(), uses.end(), is_past), uses.end());
  uses.push_back({region, writes, stream, time, line});
  return "";
}

// Nobody replays what has used it any more: what is idle goes, what is held becomes the holder's alone.
Pool::~Pool() {
  for (char* start : all) {
    auto at = blocks().find(start);
    if (at != blocks().end()) at->second.pool = nullptr;
  }
  for (auto& [key, starts] : idle)
    for (char* start : starts) {
      Block block{key.second, key.first / STREAMS, key.first, nullptr, true};
      for (int k = 0; k < cards() * STREAMS; k++)
        if (queue(k).done < queue(k).launched) block.until.emplace_back(k, queue(k).launched);
      leaving().emplace_back(start, std::move(block));
    }
}

void record_use(const void* data, int stream) {
  if (auto* home = block_of(data)) home->second.recorded.insert(stream);
}

void raise_found() {
  if (found().empty()) return;
  std::string first = found().front();
  found().clear();
  TORCH_CHECK(false, first);
}

c10::Allocator* device_memory() {
  static auto* of = new Memory(true);
  return of;
}

c10::Allocator* pinned_memory() {
  static auto* of = new Memory(false);
  return of;
}

bool pinned(const void* data) {
  auto* home = block_of(data);
  return home && home->second.card < 0;
}

int card_of(const void* data) {
  auto* home = block_of(data);
  return home ? home->second.card : -1;
}

}  // namespace card
