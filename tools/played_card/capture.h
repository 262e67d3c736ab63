// A CUDA graph that is played: what streams were given between begin and end, to be run again as often as one likes.
//
// While a stream records, its clock goes on as ever, so that races among what is recorded are seen; the tasks themselves
// go to the graph. A stream that waits for an event of a recording one records too. Memory that is asked for meanwhile
// is of the graph's pool, and nobody else has it while a graph of the pool is there.
#pragma once

#include "card.h"

#include <ATen/core/Generator.h>

#include <map>
#include <thread>

namespace card {

// Numbers are drawn from where the generator stands at each replay.
struct Start {
  at::Generator from;
  std::uint64_t drawn = 0;  // by all of the graph
  std::uint64_t seed = 0, offset = 0;
};

struct Pool {
  std::map<std::pair<int, std::int64_t>, std::vector<char*>> idle;  // by stream and size
  std::vector<char*> all;
  ~Pool();
};

struct Graph {
  struct Node {
    std::function<void()> run;
    std::vector<int> after;
  };
  struct Used {
    Region region;
    bool writes;
    std::string line;
    bool own;  // memory of the pool
  };
  std::shared_ptr<std::vector<Node>> nodes = std::make_shared<std::vector<Node>>();
  std::vector<Used> uses;
  std::map<int, std::vector<int>> ends;  // of each stream that records: what its next task comes behind
  std::map<int, Clock> knew;             // and what it knew before
  int origin = -1, card = -1, mode = 0;
  std::thread::id by;
  bool over = false;
  std::string broken;
  std::shared_ptr<Pool> pool;
  std::vector<std::shared_ptr<Start>> starts;
};

// All with the lock held.
Graph* recording();                                           // the graph that is being recorded, if one is
Graph* recording(int stream);                                 // the graph that a stream records
void add(Graph& graph, int stream, std::function<void()> run);
void join(Graph& graph, int stream);                          // the stream records from now on

void graph_draws(Graph& graph, const at::Generator& of);       // its numbers are others at each replay
Start drawn_on(const Start& of);                              // a replay draws
at::Generator draws_of(c10::DeviceIndex index);

}  // namespace card
