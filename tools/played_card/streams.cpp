// Streams and events: queues of tasks, run late, in any order that waits allow.
#include "capture.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <random>

namespace card {

namespace {

int setting(const char* name, int otherwise) {
  const char* said = std::getenv(name);
  return said ? std::atoi(said) : otherwise;
}

std::vector<Queue>& queues() {
  static auto* all = new std::vector<Queue>(std::size_t(cards()) * STREAMS);
  return *all;
}

std::mt19937& die() {
  static auto* of = new std::mt19937(unsigned(setting("PLAYED_SEED", 0)));
  return *of;
}

thread_local int now = 0;
thread_local std::vector<int> streams;  // current ones, by device
std::vector<std::string>& failures() {
  static auto* all = new std::vector<std::string>();
  return *all;
}

}  // namespace

int cards() {
  static const int count = setting("PLAYED_CARDS", 4);
  return count;
}

std::mutex& lock() {
  static auto* of = new std::mutex();
  return *of;
}

int& current_card() { return now; }

void Clock::learn(int stream, Time time) {
  if (stream >= int(of_.size())) of_.resize(stream + 1);
  if (of_[stream] < time) of_[stream] = time;
}

void Clock::learn(const Clock& other) {
  for (std::size_t k = 0; k < other.of_.size(); k++) learn(int(k), other.of_[k]);
}

int number(c10::Stream stream) { return stream.device_index() * STREAMS + int(stream.id()); }

c10::Stream stream_of(int number) {
  c10::Device device(c10::DeviceType::CUDA, c10::DeviceIndex(number / STREAMS));
  return c10::Stream(c10::Stream::UNSAFE, device, number % STREAMS);
}

int current_stream(int device) {
  return device < int(streams.size()) && streams[device] >= 0 ? streams[device] : device * STREAMS;
}

int exchange_stream(int device, int number) {
  int before = current_stream(device);
  if (device >= int(streams.size())) streams.resize(device + 1, -1);
  streams[device] = number;
  return before;
}

int new_stream(int device, bool high) {
  static std::vector<int> given(std::size_t(cards()) * 2);
  int& next = given[device * 2 + high];
  return device * STREAMS + 1 + (high ? 32 : 0) + next++ % 32;
}

Queue& queue(int stream) { return queues().at(stream); }

Clock& host() {
  static auto* of = new Clock();
  return *of;
}

Time launch(int stream, std::function<void()> run, bool meets) {
  Queue& of = queue(stream);
  TORCH_CHECK(!of.records || !meets, "played card: collectives of several processes are not recorded");
  if (of.records) add(*of.records, stream, std::move(run));
  of.knows.learn(host());
  of.knows.learn(stream, ++of.launched);
  of.tasks.push_back({of.records ? nullptr : std::move(run), -1, 0, meets});
  if (meets) changed().notify_all();
  return of.launched;
}

std::condition_variable& changed() {
  static auto* of = new std::condition_variable();
  return *of;
}

void changed_somewhere() {
  std::unique_lock<std::mutex> own(lock(), std::adopt_lock);
  changed().wait(own);
  own.release();
}

void wait(int stream, const Event& event) {
  if (event.stream < 0) return;
  Queue& of = queue(stream);
  Graph* open = recording();
  TORCH_CHECK(!event.of || event.of == open,
              "CUDA error: operation not permitted on an event last recorded in a capturing stream (played card)");
  TORCH_CHECK(!of.records || event.of, "CUDA error: dependency created on uncaptured work in another stream (played card)");
  if (event.of) join(*open, stream);
  if (of.records) {
    auto& ends = of.records->ends[stream];
    ends.insert(ends.end(), event.behind.begin(), event.behind.end());
    std::sort(ends.begin(), ends.end());
    ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  }
  of.knows.learn(event.knows);
  of.knows.learn(stream, ++of.launched);
  of.tasks.push_back({nullptr, event.stream, event.time});
}

Event record(int stream) {
  Queue& of = queue(stream);
  of.knows.learn(host());
  std::chrono::duration<double> at = std::chrono::steady_clock::now().time_since_epoch();
  return {stream, of.launched, of.knows, at.count(), of.records, of.records ? of.records->ends[stream] : std::vector<int>()};
}

bool advance(int stream, Time upto, bool may_wait) {
  Queue& of = queue(stream);
  while (of.done < upto) {
    if (of.busy) {  // another thread is at its first task
      if (!may_wait) return false;
      changed_somewhere();
      continue;
    }
    of.busy = true;
    Task task = std::move(of.tasks.front());
    bool ran = task.other < 0 || advance(task.other, task.upto, may_wait);
    if (ran && task.meets && !may_wait) ran = false;
    if (ran && task.run) {
      if (task.meets) lock().unlock();
      task.run();
      if (task.meets) lock().lock();
    }
    of.busy = false;
    changed().notify_all();  // who hears of it waits for the lock
    if (!ran) {
      of.tasks.front() = std::move(task);
      return false;
    }
    of.tasks.pop_front();
    of.done++;
  }
  return true;
}

void synchronize(int stream) {
  Queue& of = queue(stream);
  roll();
  advance(stream, of.launched);
  host().learn(of.knows);
  host().learn(stream, of.launched);
  raise_found();
  if (failures().empty()) return;
  std::string message = failures().front();
  failures().clear();
  TORCH_CHECK(false, "CUDA error: device-side assert triggered (played card: ", message, ")");
}

void synchronize_device(int device) {
  for (int k = 0; k < STREAMS; k++) {
    Queue& of = queue(device * STREAMS + k);
    if (of.launched) synchronize(device * STREAMS + k);
  }
}

void roll() {
  for (int tries = int(die()() % 3); tries > 0; tries--) {
    int stream = int(die()() % queues().size());
    Queue& of = queue(stream);
    if (of.done < of.launched) advance(stream, of.done + 1 + die()() % (of.launched - of.done), false);
  }
}

void failed(const std::string& message) { failures().push_back(message); }

Counts& counts() {
  static auto* of = new Counts();
  return *of;
}

}  // namespace card
