// What the source of a kernel sees in the emulator, included ahead of it: CUDA's built-ins and the ptx wrappers.
#pragma once

#include "builtins.h"
#include "primitives.h"

#undef __forceinline__
#define __forceinline__ inline

namespace hc::emu {

template <unsigned... I>
struct Indices {};

// Calls the entry with its by-value parameters, copied from where arguments[i] points. Not instrumented: the argument
// block is the launch's, not the kernel's.
template <class... P, unsigned... I>
__attribute__((no_sanitize("thread", "undefined"))) void call_with(void (*entry)(P...), const void* const* arguments,
                                                                   Indices<I...>) {
    entry(*static_cast<const P*>(arguments[I])...);
}

template <class... P>
__attribute__((no_sanitize("thread", "undefined"))) void call(void (*entry)(P...), const void* const* arguments) {
    call_with(entry, arguments, Indices<__integer_pack(sizeof...(P))...>{});
}

}  // namespace hc::emu
