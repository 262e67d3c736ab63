// A card that is played: streams, events and memory of CUDA devices on the host, and a record of who waits for whom.
//
// A kernel is put on a stream's queue when it is launched and runs when somebody waits for it, or a seeded die says so.
// Every stream knows, by a vector clock, which kernels of others come before its next one. Two uses of the same bytes,
// one of which writes, must be so ordered: `used` says what was not, with the lines of both.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace card {

struct Graph;

using Time = std::uint64_t;

constexpr int STREAMS = 65;  // of a device: its default one, then 32 of each priority, given out in turn as CUDA does

int cards();           // how many are played: PLAYED_CARDS, 4 by default
std::mutex& lock();    // held by whoever reads or changes what follows
struct Held {          // has the lock, and lets others have Python meanwhile
  Held();
  ~Held();
  void* python;
};
int& current_card();   // of this thread

// What is known to come before: for every stream, by number, the last of its tasks that does.
class Clock {
 public:
  bool has(int stream, Time time) const { return stream < int(of_.size()) && of_[stream] >= time; }
  void learn(int stream, Time time);
  void learn(const Clock& other);

 private:
  std::vector<Time> of_;
};

struct Task {
  std::function<void()> run;
  int other = -1;  // a stream that has to have come as far as `upto` first
  Time upto = 0;
  bool meets = false;  // it waits for other processes, so it runs without the lock, and not when the die says so
};

struct Queue {
  Clock knows;
  Time launched = 0, done = 0;
  bool busy = false;  // a thread is at its first task
  std::deque<Task> tasks;
  Graph* records = nullptr;  // where its tasks go instead (capture.cpp)
};

struct Event {
  int stream = -1;  // -1: it was not recorded yet
  Time time = 0;
  Clock knows;
  double at = 0;  // seconds of the host's clock
  Graph* of = nullptr;  // recorded in a graph, and behind which of its tasks
  std::vector<int> behind;
};

int number(c10::Stream stream);
c10::Stream stream_of(int number);
int current_stream(int device);             // of this thread, by number
int exchange_stream(int device, int number);
int new_stream(int device, bool high);

// All below are called with the lock held.
Queue& queue(int stream);
Clock& host();                              // what the host knows to have ended
Time launch(int stream, std::function<void()> run, bool meets = false);
void wait(int stream, const Event& event);  // what the stream gets from now on comes behind the event
Event record(int stream);
bool advance(int stream, Time upto, bool may_wait = true);  // run what has to be run for that; whether it has
std::condition_variable& changed();         // tasks came or ended
void changed_somewhere();                   // wait until they did; the lock is not held meanwhile
void synchronize(int stream);
void synchronize_device(int device);
void roll();                                // the die: some streams go on for a while

// Bytes that an op reads or writes: elements of so many bytes from `start` on.
struct Region {
  char* start = nullptr;
  std::vector<std::int64_t> sizes, strides;
  int element = 1;
  char *low = nullptr, *high = nullptr;  // the first byte, and the one behind the last
  bool dense = true;
  void close();  // fills in the last three
  bool meets(const Region& other) const;
};

// A task of a stream uses bytes. Returns what is not ordered, or nothing.
std::string used(const Region& region, bool writes, int stream, Time time, const std::string& line);
void record_use(const void* data, int stream);  // Tensor.record_stream
void raise_found();                             // an error for the first race that was found where none can be raised
// The op, and the lines of Python that this thread is at. Waits for Python: not to be called with the lock held.
std::string here(const std::string& op);

struct Counts {
  std::int64_t launched = 0, syncs = 0, waited = 0, races = 0, allocations = 0, replays = 0;
  std::int64_t allocated = 0, peak = 0, reserved = 0;
  std::int64_t communicators = 0, collectives = 0;  // of NCCL, as it is played
};
Counts& counts();
void count_sync(const std::string& line);  // the host waits for values; an error where a test forbids that
void refuse_recorded(const std::string& what);  // an error while a graph is recorded; not to be called with the lock held
void refuse_sync(const std::string& line);      // the same, with the lock held
void failed(const std::string& message);   // a kernel raised while nobody could be told: the next wait is

// What a kernel that draws is given: the number is known when it runs, since a graph draws others at each replay.
struct Start;
struct Drawn {
  std::uint64_t seed = 0, offset = 0;
  std::shared_ptr<Start> start;
  std::uint64_t number() const;
};

c10::Allocator* device_memory();
c10::Allocator* pinned_memory();
bool pinned(const void* data);
int card_of(const void* data);  // -1 where it is none

}  // namespace card
