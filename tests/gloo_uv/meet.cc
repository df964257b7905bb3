// One of two ranks: meet uv|tcp ADDRESS RANK STORE TIMEOUT_MS.
// It waits for a line before each step, and tells in a line what became of it: it forms the group, then sums again and
// again; at "leave" it leaves the group.

#include <csignal>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <unistd.h>

#include <gloo/allreduce.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/uv/device.h>

constexpr size_t kValues = 1 << 20;

void tell(const std::string& what) {
  std::cout << what << std::endl;
}

std::string waitForALine() {
  std::string line;
  if (!std::getline(std::cin, line)) {
    _exit(0);
  }
  return line;
}

// Holds a rank up before it connects: its address is in the store by then.
class Held : public gloo::rendezvous::FileStore {
 public:
  using FileStore::FileStore;

  void set(const std::string& key, const std::vector<char>& data) override {
    FileStore::set(key, data);
    if (key == "0" || key == "1") {
      tell("published");
      waitForALine();
    }
  }
};

std::shared_ptr<gloo::transport::Device> listenOn(const std::string& transport, const std::string& address) {
  if (transport == "uv") {
    gloo::transport::uv::attr attr;
    attr.hostname = address;
    return gloo::transport::uv::CreateDevice(attr);
  }
  gloo::transport::tcp::attr attr;
  attr.hostname = address;
  return gloo::transport::tcp::CreateDevice(attr);
}

void sum(std::shared_ptr<gloo::Context> context, uint32_t tag) {
  std::vector<float> values(kValues, 1);
  gloo::AllreduceOptions options(context);
  options.setOutput(values.data(), values.size());
  options.setReduceFunction(
      [](void* c, const void* a, const void* b, size_t n) { gloo::sum<float>(c, a, b, n); });
  options.setTag(tag);
  try {
    gloo::allreduce(options);
    tell("summed");
  } catch (const std::exception& error) {
    tell(std::string("raised: ") + error.what());
  }
}

int main(int, char** argv) {
  signal(SIGPIPE, SIG_IGN); // as Python does
  auto device = listenOn(argv[1], argv[2]);
  tell("listens");
  try {
    auto store = std::make_shared<Held>(argv[4]);
    auto context = std::make_shared<gloo::rendezvous::Context>(std::stoi(argv[3]), 2);
    context->setTimeout(std::chrono::milliseconds(std::stoi(argv[5])));
    context->connectFullMesh(store, device);
    tell("formed");
    for (uint32_t tag = 0;; ++tag) {
      const auto how = waitForALine();
      if (how == "leave") {
        context.reset();
        tell("left");
      } else if (!context) {
        tell("is there");
      } else {
        sum(context, tag);
      }
    }
  } catch (const std::exception& error) {
    tell(std::string("raised: ") + error.what());
  }
  waitForALine();
  _exit(0);
}
