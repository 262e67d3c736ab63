// Every op of torch on a card: the kernel of the host, on the bytes of the card, when the stream comes to it.
//
// What an op returns is known before it runs from its kernel for tensors without data; an op that has none, or whose
// result's shape is in its values, runs at once, behind all that its stream has got.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h>

#include "card.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <unordered_set>

namespace card {

at::Generator draws_of(c10::DeviceIndex index);
Drawn draw(const at::Generator& given, int stream);

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceType;
using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;

int forbidden = 0;  // syncs: 0 allowed, 1 a warning, 2 an error

// The thread's own settings (autograd, modes, functorch) are those of whoever waits, not of who launched.
struct Plain {
  c10::impl::ForceDispatchKeyGuard guard{c10::impl::LocalDispatchKeySet(keys())};
  static c10::impl::PODLocalDispatchKeySet keys() {
    c10::impl::PODLocalDispatchKeySet of{};
    of.set_included(c10::DispatchKeySet(DispatchKey::BackendSelect));
    of.set_excluded(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    return of;
  }
};

// A tensor as the kernels of the host see it: where its bytes are, and how they lie.
struct Seen {
  void* data;
  std::vector<std::int64_t> sizes, strides;
  c10::ScalarType dtype;
  bool conj, neg;

  explicit Seen(const Tensor& of)
      : data(of.storage().mutable_data() ? static_cast<char*>(of.storage().mutable_data()) + of.storage_offset() * std::int64_t(of.itemsize()) : nullptr),
        sizes(of.sizes().vec()), strides(of.strides().vec()), dtype(of.scalar_type()), conj(of.is_conj()), neg(of.is_neg()) {}

  Tensor tensor() const {
    Tensor of = at::from_blob(data, sizes, strides, at::TensorOptions().dtype(dtype));
    if (conj) of._set_conj(true);
    if (neg) of._set_neg(true);
    return of;
  }
  Region region() const {
    Region of{static_cast<char*>(data), sizes, strides, int(c10::elementSize(dtype))};
    of.close();
    return of;
  }
};

Tensor without_data(const Tensor& of) {
  auto made = at::detail::empty_strided_meta(of.sizes(), of.strides(), of.scalar_type());
  if (of.is_conj()) made._set_conj(true);
  if (of.is_neg()) made._set_neg(true);
  return made;
}

// A tensor on a card over given bytes; a view is a tensor for inference if its base is, whatever mode is on.
Tensor on_card(c10::Storage storage, const Tensor& like, const Tensor* base = nullptr) {
  auto made = base ? at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), base->key_set(), like.dtype())
                   : at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(DispatchKey::CUDA), like.dtype());
  auto* of = made.unsafeGetTensorImpl();
  of->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  return made;
}

struct On {  // the card, and the stream, of an op
  Device device;
  int before = current_card();
  explicit On(Device of) : device(of) { current_card() = of.index(); }
  ~On() { current_card() = before; }
  int stream() const { return current_stream(device.index()); }
};

Device indexed(Device of) { return of.has_index() ? of : Device(DeviceType::CUDA, c10::DeviceIndex(current_card())); }

Tensor empty_like_this(const Tensor& of, Device device) {
  On on(device);
  auto bytes = at::detail::computeStorageNbytes(of.sizes(), of.strides(), of.itemsize(), of.storage_offset());
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, device_memory(), true);
  return on_card(std::move(storage), of);
}

// Calls it for every tensor of an argument, which is changed to what comes back.
void each_tensor(IValue& value, const std::function<Tensor(const Tensor&)>& to) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = to(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorVector()) list.push_back(each.defined() ? to(each) : each);
    value = std::move(list);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& each : value.toOptionalTensorVector())
      list.push_back(each && each->defined() ? std::optional<Tensor>(to(*each)) : each);
    value = std::move(list);
  }
}

// What waits for values whatever it is given; and what takes tensors of the host beside those of a card.
const std::unordered_set<std::string> WAITS{
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::equal", "aten::bincount",
    "aten::is_set_to", "aten::nonzero_static", "aten::repeat_interleave", "aten::_histogramdd_bin_edges"};
const std::unordered_set<std::string> MIXED{
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_unsafe_index",
    "aten::_unsafe_index_put"};
// What answers by the layout of its arguments alone.
const std::unordered_set<std::string> HOST_ONLY{"aten::_fused_sdp_choice", "aten::is_pinned", "aten::_has_compatible_shallow_copy_type"};

bool is_view(const c10::FunctionSchema& schema) {
  for (auto& each : schema.returns())
    if (each.alias_info() && !each.alias_info()->isWrite()) return true;
  return false;
}

bool draws(const c10::OperatorHandle& op) {
  auto tags = op.getTags();
  return std::find(tags.begin(), tags.end(), at::Tag::nondeterministic_seeded) != tags.end();
}

struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema = op.schema();
  std::vector<IValue> arguments;
  std::vector<Tensor> given;   // all tensors of it, in order
  std::vector<bool> written;   // of each whether the op writes it
  Device device{DeviceType::CUDA, c10::DeviceIndex(current_card())};
  bool on_host = false;        // a factory that was told so

  Call(const c10::OperatorHandle& of, Stack* stack) : op(of) {
    auto popped = torch::jit::pop(*stack, schema.arguments().size());
    arguments.assign(popped.begin(), popped.end());
    bool found = false, ranked = false;
    for (std::size_t k = 0; k < arguments.size(); k++) {
      auto* alias = schema.arguments()[k].alias_info();
      if (arguments[k].isDevice()) {
        on_host = !arguments[k].toDevice().is_cuda();
        if (!found && !on_host) device = indexed(arguments[k].toDevice());
      }
      each_tensor(arguments[k], [&](const Tensor& each) {
        given.push_back(each);
        written.push_back(alias && alias->isWrite());
        if (each.is_cuda() && (!found || (!ranked && each.dim()))) {
          device = each.device();
          found = true;
          ranked = each.dim() > 0;
        }
        return each;
      });
    }
  }

  std::string name() const { return schema.name(); }

  void check_devices() const {
    if (MIXED.count(name())) return;
    for (const Tensor& each : given)
      TORCH_CHECK(each.device() == device || (each.is_cpu() && !each.dim()),
                  "Expected all tensors to be on the same device, but found at least two devices, ", device, " and ",
                  each.device(), "! (in ", name(), ", on a played card)");
  }

  bool waits() const {
    if (WAITS.count(name())) return true;
    if (!MIXED.count(name())) return false;
    for (std::size_t k = 1; k < given.size(); k++)  // a mask is looked at to know how many it picks
      if (given[k].scalar_type() == at::kBool || given[k].scalar_type() == at::kByte) return true;
    return false;
  }

  // A generator for the host's kernel, whose numbers depend on the card's seed and how far it was drawn.
  std::optional<Drawn> drawn() {
    if (!draws(op)) return std::nullopt;
    at::Generator from = draws_of(device.index());
    for (std::size_t k = 0; k < arguments.size(); k++) {
      if (arguments[k].isGenerator()) from = arguments[k].toGenerator();
    }
    TORCH_CHECK(from.device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
    return draw(from, current_stream(device.index()));
  }
};

bool takes_generator(const c10::FunctionSchema& schema) {
  for (auto& each : schema.arguments())
    if (each.name() == "generator") return true;
  return false;
}

// A card keeps means and deviations of half precision in single; the host's kernels want all of one dtype, so they are
// given singles, and what comes out is rounded where it is put.
const std::unordered_set<std::string> SINGLE{"aten::native_layer_norm_backward", "aten::native_group_norm_backward"};

void make_single(std::vector<IValue>& arguments) {
  for (IValue& each : arguments)
    each_tensor(each, [](const Tensor& of) { return of.scalar_type() == at::kHalf || of.scalar_type() == at::kBFloat16 ? of.to(at::kFloat) : of; });
}

// The op on the host's side of it. `arguments` have tensors of the host already.
std::vector<IValue> on_host(const c10::OperatorHandle& op, std::vector<IValue> arguments, const std::optional<Drawn>& drawn) {
  Plain plain;
  std::optional<std::uint64_t> seed = drawn ? std::optional(drawn->number()) : std::nullopt;
  auto& schema = op.schema();
  for (std::size_t k = 0; k < arguments.size(); k++) {
    auto& name = schema.arguments()[k].name();
    if (arguments[k].isDevice()) arguments[k] = Device(DeviceType::CPU);
    else if (name == "pin_memory" && arguments[k].isBool()) arguments[k] = false;
    else if (name == "generator") arguments[k] = seed ? IValue(at::detail::createCPUGenerator(*seed)) : IValue();
  }
  if (SINGLE.count(schema.name())) make_single(arguments);
  Stack stack(std::make_move_iterator(arguments.begin()), std::make_move_iterator(arguments.end()));
  at::Generator own = at::detail::getDefaultCPUGenerator();
  Tensor before;
  bool swapped = seed && !takes_generator(schema);
  if (swapped) {
    before = own.get_state();
    own.set_current_seed(*seed);
  }
  try {
    op.callBoxed(&stack);
  } catch (...) {
    if (swapped) own.set_state(before);
    throw;
  }
  if (swapped) own.set_state(before);
  return {stack.begin(), stack.end()};
}

// The arguments as the host's kernels take them. Views of the same bytes are tensors over these.
std::vector<IValue> seen_by_host(const Call& call, bool copied = false) {
  Plain plain;
  std::vector<IValue> all = call.arguments;
  for (IValue& each : all)
    each_tensor(each, [&](const Tensor& of) {
      if (of.is_cuda()) return Seen(of).tensor();
      if (!copied) return of;
      Tensor own = of.clone();
      own.unsafeGetTensorImpl()->set_wrapped_number(of.unsafeGetTensorImpl()->is_wrapped_number());
      return own;
    });
  return all;
}

// Notes a use of bytes, and refuses one that nothing orders.
void use(const Region& region, bool writes, int stream, Time time, const std::string& line) {
  std::string race = used(region, writes, stream, time, line);
  TORCH_CHECK(race.empty(), race);
}

void use_given(const Call& call, int stream, Time time, const std::string& line) {
  for (std::size_t k = 0; k < call.given.size(); k++)
    if (call.given[k].is_cuda()) use(Seen(call.given[k]).region(), call.written[k], stream, time, line);
}

// Views: nothing of the bytes is looked at.
void view(Call& call, Stack* stack) {
  Plain plain;
  std::vector<IValue> arguments = call.arguments;
  std::vector<std::pair<Tensor, Tensor>> pairs;  // on the card, and without data over the same offsets
  for (IValue& each : arguments)
    each_tensor(each, [&](const Tensor& of) {
      if (!of.is_cuda()) return of;
      c10::Storage storage(c10::Storage::use_byte_size_t(), of.storage().nbytes(),
                           c10::DataPtr(of.storage().mutable_data(), Device(DeviceType::CPU)), nullptr, false);
      auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(DispatchKey::CPU), of.dtype());
      made.unsafeGetTensorImpl()->set_sizes_and_strides(of.sizes(), of.strides(), of.storage_offset());
      if (of.is_conj()) made._set_conj(true);
      if (of.is_neg()) made._set_neg(true);
      pairs.emplace_back(of, made);
      return made;
    });
  auto results = on_host(call.op, std::move(arguments), std::nullopt);
  for (IValue& each : results) {
    each_tensor(each, [&](const Tensor& of) -> Tensor {
      for (auto& [card, host] : pairs)
        if (host.storage().is_alias_of(of.storage())) return on_card(card.storage(), of, &card);
      return of;
    });
    stack->push_back(std::move(each));
  }
}

// At once: behind all that the stream has got. `counted` where the host of a real card would wait as well.
void at_once(Call& call, Stack* stack, bool counted) {
  On on(call.device);
  std::string line = here(call.name());
  auto seed = call.drawn();
  std::vector<IValue> results;
  {
    Held held;
    raise_found();
    if (counted) count_sync(line);
    counts().launched++;
    int stream = on.stream();
    Time time = launch(stream, nullptr);
    use_given(call, stream, time, line);
    advance(stream, time);
    if (counted) synchronize(stream);
    results = on_host(call.op, seen_by_host(call), seed);
  }
  // In place and into `out=`: the tensor that was given. All else is copied to new memory of the card.
  auto& returns = call.schema.returns();
  for (std::size_t k = 0; k < results.size(); k++) {
    auto* alias = k < returns.size() ? returns[k].alias_info() : nullptr;
    if (alias && alias->isWrite()) {
      for (std::size_t a = 0; a < call.arguments.size(); a++) {
        auto* of = call.schema.arguments()[a].alias_info();
        if (of && of->beforeSets() == alias->beforeSets()) results[k] = call.arguments[a];
      }
    } else if (!call.on_host) {
      each_tensor(results[k], [&](const Tensor& of) -> Tensor {
        if (!of.is_cpu()) return of;
        Tensor made = empty_like_this(without_data(of), call.device);
        Held held;
        Plain plain;
        int stream = on.stream();
        Time time = launch(stream, nullptr);
        use(Seen(made).region(), true, stream, time, line);
        advance(stream, time);
        Seen(made).tensor().copy_(of);
        return made;
      });
    }
    stack->push_back(std::move(results[k]));
  }
}

// What it will return, as tensors without data; nothing where only the values know. Given tensors that it changes in
// size are among them.
std::optional<std::vector<IValue>> foreseen(const Call& call, std::vector<std::pair<Tensor, Tensor>>& pairs) {
  if (call.on_host || !call.op.hasComputedKernelForDispatchKey(DispatchKey::Meta)) return std::nullopt;
  Plain plain;
  std::vector<IValue> arguments = call.arguments;
  for (IValue& each : arguments) {
    if (each.isDevice()) each = Device(DeviceType::Meta);
    if (each.isGenerator()) each = IValue();
    each_tensor(each, [&](const Tensor& of) {
      if (of.is_cpu() && !of.dim()) return of;
      for (auto& [card, meta] : pairs)
        if (card.is_same(of)) return meta;
      Tensor meta = without_data(of);
      pairs.emplace_back(of, meta);
      return meta;
    });
  }
  Stack stack(std::make_move_iterator(arguments.begin()), std::make_move_iterator(arguments.end()));
  try {
    call.op.callBoxed(&stack);
  } catch (const std::exception&) {
    // The kernel of the host says better what is wrong, if anything is; in a graph it is not called yet, but for a kernel
    // that writes to what it is given and makes nothing, as those of fused optimizers.
    if (call.schema.returns().empty() && queue(current_stream(call.device.index())).records) return std::vector<IValue>();
    return std::nullopt;
  }
  for (const IValue& each : stack)  // a number may be in the values
    if (!each.isTensor() && !each.isTensorList() && !each.isNone()) return std::nullopt;
  return std::vector<IValue>(std::make_move_iterator(stack.begin()), std::make_move_iterator(stack.end()));
}

void put(const Tensor& to, const Tensor& from) {
  if (!from.numel()) return;  // what a card's kernel leaves in it and the host's does not, such as a batch norm's means
  if (to.data_ptr() != from.data_ptr() && to.numel()) to.copy_(from);
}

// A card's kernel does not start for what is empty, so that its generator stays.
bool draws_nothing(const Call& call, const std::vector<Seen>& news) {
  for (auto& each : news)
    for (auto size : each.sizes)
      if (!size) return true;
  for (std::size_t k = 0; k < call.given.size(); k++)
    if (call.written[k] && !call.given[k].numel()) return true;
  return false;
}

void later(Call& call, Stack* stack, std::vector<IValue> promised, const std::vector<std::pair<Tensor, Tensor>>& pairs) {
  On on(call.device);
  std::string line = here(call.name());
  for (auto& [card, meta] : pairs)  // `out=` of another size, as the kernel without data has left it
    if (card.is_cuda() && card.sizes() != meta.sizes()) at::native::resize_output(card, meta.sizes());
  std::vector<Seen> news;
  std::vector<std::optional<std::size_t>> homes;  // of every tensor of the result: which of the new ones it is
  for (IValue& each : promised)
    each_tensor(each, [&](const Tensor& of) -> Tensor {
      for (auto& [card, meta] : pairs)
        if (meta.is_same(of)) {
          homes.push_back(std::nullopt);
          return card;
        }
      Tensor made = empty_like_this(of, call.device);
      homes.push_back(news.size());
      news.emplace_back(made);
      return made;
    });
  std::optional<Drawn> seed;
  if (!draws_nothing(call, news)) seed = call.drawn();
  // What the kernel sees of the card are bytes: memory that is freed while it waits is not kept for it.
  // Numbers of the host are read at once: a task that ends with a tensor of Python's would wait for Python's lock.
  std::vector<IValue> arguments = seen_by_host(call, true);
  auto run = [op = call.op, arguments = std::move(arguments), seed, news, homes, line]() {
    try {
      Plain plain;
      auto results = on_host(op, arguments, seed);
      std::size_t at = 0;
      for (IValue& each : results)
        each_tensor(each, [&](const Tensor& of) {
          if (homes.at(at)) put(news[*homes[at]].tensor(), of);
          at++;
          return of;
        });
    } catch (const c10::Error& error) {
      failed(line + ": " + error.what_without_backtrace());
    } catch (const std::exception& error) {
      failed(line + ": " + error.what());
    }
  };
  {
    Held held;
    raise_found();
    counts().launched++;
    int stream = on.stream();
    Time time = launch(stream, std::move(run));
    use_given(call, stream, time, line);
    for (auto& each : news) use(each.region(), true, stream, time, line);
    roll();
  }
  for (IValue& each : promised) stack->push_back(std::move(each));
}

void kernel(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op, stack);
  if (HOST_ONLY.count(call.name())) {
    for (IValue& each : on_host(op, seen_by_host(call), std::nullopt)) stack->push_back(std::move(each));
    return;
  }
  if (is_view(call.schema)) return view(call, stack);
  call.check_devices();
  if (call.waits()) return at_once(call, stack, true);
  std::vector<std::pair<Tensor, Tensor>> pairs;
  auto promised = foreseen(call, pairs);
  if (!promised) return at_once(call, stack, false);
  later(call, stack, std::move(*promised), pairs);
}

// Between the host and cards, and between cards.
Tensor& copy_(Tensor& self, const Tensor& given, bool non_blocking) {
  Tensor from = given;
  TORCH_CHECK(self.defined() && from.defined(), "copy_: undefined tensor");
  if (from.sizes() != self.sizes()) from = from.expand(self.sizes());
  if (self.is_same(from) || !self.numel()) return self;
  if (self.is_meta() || from.is_meta()) return self;
  std::string line = here("copy_");
  bool to_card = self.is_cuda(), from_card = from.is_cuda();
  On on(from_card ? from.device() : self.device());
  Tensor host = to_card ? from : self;  // where one of them is
  bool across = to_card != from_card;
  bool is_pinned = false;
  if (across) {
    Held held;
    is_pinned = pinned(host.storage().data());
  }
  Plain plain;
  Tensor staged = across && to_card && !is_pinned ? from.clone() : Tensor();  // a pageable source is read at once
  Tensor source_seen = staged.defined() ? staged : Seen(from).tensor();
  bool waits = across && (!non_blocking || (!to_card && !is_pinned));
  Seen target(self);
  auto run = [target, source_seen]() { target.tensor().copy_(source_seen); };
  Held held;
  raise_found();
  counts().launched++;
  int stream = on.stream();
  int there = to_card && from_card ? current_stream(self.device().index()) : stream;
  if (there != stream) wait(stream, record(there));
  if (across && (!non_blocking || (staged.defined() && queue(stream).records))) count_sync(line);
  Time time = launch(stream, run);
  if (!staged.defined()) use(Seen(from).region(), false, stream, time, line);
  use(target.region(), true, stream, time, line);
  if (there != stream) wait(there, record(stream));
  if (waits) synchronize(stream);
  else roll();
  return self;
}

void record_stream(Tensor& self, c10::Stream stream) {
  Held held;
  record_use(self.storage().data(), number(stream));
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  On on(indexed(device.value_or(Device(DeviceType::CUDA))));
  return at::detail::empty_generic(size, device_memory(), c10::DispatchKeySet(DispatchKey::CUDA),
                                   dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  On on(indexed(device.value_or(Device(DeviceType::CUDA))));
  return at::detail::empty_strided_generic(size, stride, device_memory(), c10::DispatchKeySet(DispatchKey::CUDA),
                                           dtype.value_or(at::get_default_dtype_as_scalartype()));
}

// More bytes for a storage: new memory, into which the old is copied on the stream.
void grow(at::TensorImpl* self, std::size_t bytes) {
  c10::Storage storage = self->unsafe_storage();
  if (storage.nbytes() >= bytes) return;
  On on(self->device());
  c10::DataPtr made = device_memory()->allocate(bytes);
  std::string line = here("resize_");
  std::int64_t kept = std::int64_t(storage.nbytes());
  if (kept) {
    Held held;
    auto* to = made.get();
    auto* from = storage.mutable_data();
    int stream = on.stream();
    Time time = launch(stream, [=] { std::memcpy(to, from, std::size_t(kept)); });
    Region region{static_cast<char*>(from), {kept}, {1}, 1};
    region.close();
    use(region, false, stream, time, line);
  }
  storage.set_data_ptr_noswap(std::move(made));
  storage.set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* of = self.unsafeGetTensorImpl();
  of->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) of->empty_tensor_restride(*format);
  grow(of, at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), self.storage_offset()));
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source, std::int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* of = self.unsafeGetTensorImpl();
  of->set_storage_keep_dtype(std::move(source));
  of->set_storage_offset(offset);
  if (stride.data()) of->set_sizes_and_strides(size, stride, offset);
  else of->set_sizes_contiguous(size);
  grow(of, at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), self.storage_offset()));
  return self;
}

Tensor& set_source_storage(Tensor& self, c10::Storage source) {
  auto count = std::int64_t(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {});
}

Tensor& set_source_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  On on(self.device());
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, device_memory(), true), 0, {0}, {});
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", &copy_);
  m.impl("record_stream", &record_stream);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_source_storage);
  m.impl("set_.source_Tensor", &set_source_tensor);
  m.impl("set_", &set_nothing);
  // Torch would choose kernels for these that only a card has.
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&kernel>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&kernel>());
  // These would be made of their variants for `out=`, which make that larger and smaller again.
  for (auto name : {"mse_loss", "smooth_l1_loss", "huber_loss"}) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&kernel>());
}

}  // namespace

Held::Held() : python(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) { lock().lock(); }

Held::~Held() {
  lock().unlock();
  if (python) PyEval_RestoreThread(static_cast<PyThreadState*>(python));
}

// Kernels are launched without Python's lock, which is taken for a moment where ours is not held.
std::string here(const std::string& op) {
  if (!Py_IsInitialized() || !PyGILState_GetThisThreadState()) return op + " on a thread of torch";
  bool had = PyGILState_Check();
  PyGILState_STATE state{};
  if (!had) state = PyGILState_Ensure();
  std::string all = op;
  int told = 0;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame && told < 3) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    std::string path = file ? file : "?";
    if (path.find("/torch/") == std::string::npos && path.find("/played_card/") == std::string::npos)
      all += (told++ ? " < " : " at ") + path + ":" + std::to_string(PyFrame_GetLineNumber(frame));
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  if (!had) PyGILState_Release(state);
  return all;
}

void count_sync(const std::string& line) {
  refuse_sync(line);
  counts().syncs++;
  TORCH_CHECK(forbidden < 2, "called a synchronizing CUDA operation (played card: ", line, ")");
}

}  // namespace card

extern "C" void card_forbid_syncs(int how) { card::forbidden = how; }
