// Fences between proxies, and the order of grids that overlap.
#pragma once

#ifndef HALOCONV_EMULATOR
namespace hc::ptx {

// fence.proxy.async: the thread's ordinary shared-memory accesses come before later ones of wgmma and TMA.
__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// griddepcontrol.wait: waits until the grids that this one depends on have ended and their writes are visible.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// griddepcontrol.launch_dependents: the dependent grids may start once every block has said so or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace hc::ptx
#endif
