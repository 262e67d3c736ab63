// What torch asks of a kind of device: its guard, its hooks and its random numbers; and what Python asks of the card.
#include "capture.h"

#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

namespace card {

namespace {

bool handing_out = false;  // the next generators that are asked for are torch's own of each card

// As Philox: a seed, and how far it was drawn. What a draw has depends on these two alone.
struct Draws final : c10::GeneratorImpl {
  std::uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  explicit Draws(DeviceIndex index)
      : c10::GeneratorImpl(Device(DeviceType::CUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(std::uint64_t seed) override {
    refuse_recorded("a card's generator is seeded");
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(std::uint64_t offset) override {
    refuse_recorded("the offset of a card's generator is set");
    offset_ = offset;
  }
  std::uint64_t get_offset() const override { return offset_; }
  std::uint64_t current_seed() const override {
    refuse_recorded("the seed of a card's generator is asked for");
    return seed_;
  }
  std::uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    refuse_recorded("the state of a card's generator is set");
    TORCH_CHECK(state.numel() == 16, "a state of a card's generator has 16 bytes, this one has ", state.numel());
    std::memcpy(&seed_, state.data(), 8);
    std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    refuse_recorded("the state of a card's generator is asked for");
    at::Tensor state = at::detail::empty_cpu({16}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), &seed_, 8);
    std::memcpy(static_cast<char*>(state.mutable_data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  Draws* clone_impl() const override {
    auto* of = new Draws(device().index());
    of->seed_ = seed_;
    of->offset_ = offset_;
    return of;
  }
};

at::Generator& own(DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int k = 0; k < cards(); k++) made->push_back(at::make_generator<Draws>(DeviceIndex(k)));
    return made;
  }();
  return all->at(index < 0 ? std::size_t(current_card()) : std::size_t(index));
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device to) const override {
    Device before = getDevice();
    if (to.has_index()) setDevice(to);
    return before;
  }
  Device getDevice() const override { return {DeviceType::CUDA, DeviceIndex(current_card())}; }
  void setDevice(Device to) const override {
    TORCH_CHECK(to.index() < cards(), "CUDA error: invalid device ordinal");
    if (to.has_index()) current_card() = to.index();
  }
  void uncheckedSetDevice(Device to) const noexcept override {
    if (to.has_index()) current_card() = to.index();
  }
  int at(Device of) const { return of.has_index() ? of.index() : current_card(); }
  c10::Stream getStream(Device of) const override { return stream_of(current_stream(at(of))); }
  c10::Stream getDefaultStream(Device of) const override { return stream_of(at(of) * STREAMS); }
  c10::Stream getStreamFromGlobalPool(Device of, bool high) const override {
    Held held;
    return stream_of(new_stream(at(of), high));
  }
  c10::Stream getNewStream(Device of, int priority) const override { return getStreamFromGlobalPool(of, priority < 0); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return stream_of(exchange_stream(to.device_index(), number(to)));
  }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(cards()); }
  bool queryStream(const c10::Stream& of) const override {
    refuse_recorded("a stream is asked whether it is done");
    Held held;
    roll();
    return queue(number(of)).done == queue(number(of)).launched;
  }
  void synchronizeStream(const c10::Stream& of) const override {
    refuse_recorded("a stream is waited for");
    Held held;
    counts().waited++;
    synchronize(number(of));
  }
  void synchronizeDevice(const DeviceIndex of) const override {
    refuse_recorded("a device is waited for");
    Held held;
    counts().waited++;
    synchronize_device(of < 0 ? current_card() : of);
  }
  void record(void** event, const c10::Stream& of, const DeviceIndex, const c10::EventFlag) const override {
    Held held;
    if (!*event) *event = new Event();
    *static_cast<Event*>(*event) = card::record(number(of));
  }
  void block(void* event, const c10::Stream& of) const override {
    Held held;
    if (event) wait(number(of), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override {
    refuse_recorded("an event is asked for");
    Held held;
    auto* of = static_cast<Event*>(event);
    if (!of || of->stream < 0) return true;
    roll();
    Queue& from = queue(of->stream);
    if (from.done < of->time) advance(of->stream, from.done + 1, false);  // who asks long enough is answered
    if (from.done < of->time) return false;
    host().learn(of->knows);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    refuse_recorded("an event is waited for");
    Held held;
    auto* of = static_cast<Event*>(event);
    if (!of || of->stream < 0) return;
    counts().waited++;
    advance(of->stream, of->time);
    host().learn(of->knows);
    raise_found();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return 1e3 * (static_cast<Event*>(to)->at - static_cast<Event*>(from)->at);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& of) const override {
    Held held;
    record_use(data.get(), number(of));
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace

at::Generator draws_of(DeviceIndex index) { return own(index); }

std::uint64_t Drawn::number() const {
  std::uint64_t from = start ? start->seed : seed, at = offset + (start ? start->offset : 0);
  return from * 0x9e3779b97f4a7c15ULL + at * 0xbf58476d1ce4e5b9ULL + 1;
}

Drawn draw(const at::Generator& given, int stream) {
  auto* of = given.get<Draws>();
  {
    Held held;
    if (Graph* graph = recording(stream)) {
      for (auto& start : graph->starts) {
        if (start->from.unsafeGetGeneratorImpl() != of) continue;
        start->drawn += 4;
        return {0, start->drawn - 4, start};
      }
      TORCH_CHECK(false, "Attempt to increase offset for a CUDA generator not in capture mode. (played card: it was not registered)");
    }
  }
  std::lock_guard<std::mutex> mine(of->mutex_);
  of->offset_ += 4;
  return {of->seed_, of->offset_ - 4, nullptr};
}

void graph_draws(Graph& graph, const at::Generator& of) {
  for (auto& start : graph.starts)
    if (start->from.unsafeGetGeneratorImpl() == of.unsafeGetGeneratorImpl()) return;
  graph.starts.push_back(std::make_shared<Start>(Start{of}));
}

Start drawn_on(const Start& of) {
  auto* from = of.from.get<Draws>();
  from->offset_ += of.drawn;
  return {of.from, of.drawn, from->seed_, from->offset_ - of.drawn};
}

}  // namespace card

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DeviceIndex(card::cards()); }
  int getNumGPUs() const override { return card::cards(); }
  DeviceIndex current_device() const override { return DeviceIndex(card::current_card()); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(DeviceIndex to) const override { card::current_card() = to; }
  DeviceIndex exchangeDevice(DeviceIndex to) const override {
    DeviceIndex before = current_device();
    card::current_card() = to;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex to) const override { return exchangeDevice(to); }
  Allocator* getPinnedMemoryAllocator() const override { return card::pinned_memory(); }
  Allocator* getCUDADeviceAllocator() const override { return card::device_memory(); }
  bool isPinnedPtr(const void* data) const override {
    card::Held held;
    return card::pinned(data);
  }
  Device getDeviceFromPtr(void* data) const override {
    card::Held held;
    return {DeviceType::CUDA, DeviceIndex(card::card_of(data))};
  }
  const Generator& getDefaultGenerator(DeviceIndex index) const override { return card::own(index); }
  Generator getNewGenerator(DeviceIndex index) const override {
    if (card::handing_out) return card::own(index);
    return make_generator<card::Draws>(index < 0 ? current_device() : index);
  }
  void deviceSynchronize(DeviceIndex of) const override {
    card::refuse_recorded("a device is waited for");
    card::Held held;
    card::synchronize_device(of);
  }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

// For Python's ctypes.
extern "C" {
void card_hand_out(int whether) { card::handing_out = whether; }
std::int64_t card_count(const char* what) {
  card::Counts& of = card::counts();
  std::string name(what);
  return name == "launched" ? of.launched : name == "syncs" ? of.syncs : name == "waited" ? of.waited

       : name == "races" ? of.races : name == "allocations" ? of.allocations : name == "allocated" ? of.allocated
       : name == "peak" ? of.peak : name == "reserved" ? of.reserved
       : name == "replays" ? of.replays : name == "communicators" ? of.communicators : name == "collectives" ? of.collectives : -1;
}
void card_reset_peak() { card::counts().peak = card::counts().allocated; }
void card_forbid_syncs(int how);
}
