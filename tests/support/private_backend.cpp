// A backend of torch outside of it (PrivateUse1), whose memory is the host's and whose operations are the CPU's, so that
// tests see how torch treats such tensors. At once: it has one stream, and events that have passed.
#include <torch/extension.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/library.h>
namespace {
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device d) const override { return d; }
  c10::Device getDevice() const override { return {c10::DeviceType::PrivateUse1, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getDefaultStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
void del(void* p) { free(p); }
struct Alloc final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override { void* p = n ? malloc(n) : nullptr; return {p, p, &del, c10::Device(c10::DeviceType::PrivateUse1, 0)}; }
  c10::DeleterFnPtr raw_deleter() const override { return &del; }
  void copy_data(void* d, const void* s, std::size_t n) const override { memcpy(d, s, n); }
} alloc;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &alloc);
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    auto p = alloc.allocate(n); memcpy(p.get(), s.data(), std::min(n, (size_t)s.nbytes()));
    auto* i = s.unsafeGetStorageImpl(); i->set_data_ptr_noswap(std::move(p)); i->set_nbytes(n);
  }
};
const c10::DispatchKeySet ks(c10::DispatchKey::PrivateUse1);
at::Tensor e(c10::IntArrayRef s, std::optional<at::ScalarType> t, std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> m) {
  return at::detail::empty_generic(s, &alloc, ks, c10::dtype_or_default(t), m);
}
at::Tensor es(c10::IntArrayRef s, c10::IntArrayRef st, std::optional<at::ScalarType> t, std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(s, st, &alloc, ks, c10::dtype_or_default(t));
}
at::Tensor on_cpu(const at::Tensor& t) {
  auto a = at::from_blob(t.storage().mutable_data(), {(int64_t)(t.storage().nbytes() / t.itemsize())}, at::TensorOptions().dtype(t.dtype()).device(at::kCPU));
  return a.as_strided(t.sizes(), t.strides(), t.storage_offset());
}
at::Tensor cf(const at::Tensor& self, const at::Tensor& dst, bool) {
  auto a = self.is_cpu() ? self : on_cpu(self), b = dst.is_cpu() ? dst : on_cpu(dst);
  b.copy_(a); return dst;
}
at::Tensor& st(at::Tensor& r, at::Storage s, int64_t o, c10::IntArrayRef z, c10::IntArrayRef t) {
  auto* i = r.unsafeGetTensorImpl(); i->set_storage_keep_dtype(s); i->set_sizes_and_strides(z, t, o); return r;
}
at::Tensor v(const at::Tensor& s, c10::IntArrayRef z) { return at::native::view(s, z); }
at::Tensor as(const at::Tensor& s, c10::IntArrayRef z, c10::IntArrayRef t, std::optional<int64_t> o) { return at::native::as_strided_tensorimpl(s, z, t, o); }
const at::Tensor& rs(const at::Tensor& s, c10::SymIntArrayRef z, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(z); auto* i = s.unsafeGetTensorImpl(); i->set_sizes_contiguous(sizes);
  size_t n = s.numel() * s.itemsize(); if (n > s.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(s.storage(), n); return s;
}
at::Scalar lsd(const at::Tensor& t) { return on_cpu(t).item(); }
void fb(const c10::OperatorHandle& op, torch::jit::Stack* s) { at::native::cpu_fallback(op, s); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fb>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", e); m.impl("empty_strided", es); m.impl("_copy_from", cf); m.impl("_copy_from_and_resize", [](const at::Tensor& a, const at::Tensor& b) { return cf(a, b, false); });
  m.impl("set_.source_Storage_storage_offset", st); m.impl("view", v); m.impl("as_strided", as); m.impl("resize_", rs); m.impl("_local_scalar_dense", lsd);
}
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("init", [] { at::RegisterPrivateUse1HooksInterface(new Hooks()); }); }
