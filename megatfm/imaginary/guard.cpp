// Device guard and hooks of "cuda" that do nothing: autograd asks for them where tensors have shapes alone.
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
struct FakeCuda : public DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  DeviceType type() const override { return DeviceType::CUDA; }
  Device here() const noexcept { return Device(DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const override { return here(); }
  Device getDevice() const override { return here(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, here()); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, here()); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return Stream(Stream::DEFAULT, here()); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, here()); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, here()); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeCuda);
}
#include <ATen/detail/CUDAHooksInterface.h>
namespace at {
struct CUDAHooks : public CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}
