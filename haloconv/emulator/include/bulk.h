// The bulk groups of a thread, for the sources that put stores into them. Internal to runtime/*.cpp.
#pragma once

#include <functional>

#include "engines.h"

namespace hc::emu {

// A store of the thread's open bulk group: `read` takes [source, source + bytes) of shared memory, `write` comes
// after it.
void submit_store(const char* what, const void* source, u32 bytes, Site site, std::function<void()> read,
                  std::function<void()> write);

}  // namespace hc::emu
