// The wall-clock limit of a launch.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "core.h"

namespace hc::emu::core {

// Wakes up when the limit is reached or the launch is over.
class Watchdog {
  public:
    explicit Watchdog(double limit_s)
        : thread_([this, limit_s] {
              std::unique_lock<std::mutex> lock(mutex_);
              if (over_changed_.wait_for(lock, std::chrono::duration<double>(limit_s), [this] { return over_; }))
                  return;
              launch.expired = true;
              do slow_accesses();  // again and again: the launch may be about to remember a region
              while (!over_changed_.wait_for(lock, std::chrono::milliseconds(20), [this] { return over_; }));
          }) {}
    ~Watchdog() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            over_ = true;
        }
        over_changed_.notify_one();
        thread_.join();
    }

  private:
    std::mutex mutex_;
    std::condition_variable over_changed_;
    bool over_ = false;
    std::thread thread_;
};

}  // namespace hc::emu::core
