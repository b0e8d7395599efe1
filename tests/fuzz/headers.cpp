// The control messages of another rank, and its data, as the host engine's loop gets them: rank 0 of three makes calls, and
// the others' messages are the input's. The loop may refuse them. A call may only end when every other rank has sent the
// header of this very call.
//
// An input is a list of actions. A message is an honest one with some changed bytes, or bytes as they are.
#include "target.h"

#include <deque>
#include <string>
#include <vector>

#include "../../kernels/engine/loop.h"
#include "../../kernels/host/choose_isa.h"

// kernels/host/operations.cpp needs it for codecs, of which there are none here.
namespace qccl {
const Isa& choose_isa() { std::abort(); }
}  // namespace qccl

namespace fuzz {

namespace {

using namespace qccl;

constexpr int kRanks = 3;
constexpr unsigned kPrograms = 4;
constexpr std::size_t kMostCalls = 24;
constexpr std::size_t kMostEager = 256;
// Where a header has the text of a call: behind its number.
constexpr std::size_t kTextOffset = kSequenceOffset + 8;
// As qccl/engine/control.py packs it: magic, version 2, the kind of a call.
const std::string kCall{"qccl\2\0\1\0", 8};

// Sends end at once; receives wait for fed messages.
struct FedWire final : Wire {
  struct Receive {
    int peer, tag;
    unsigned char* data;
    std::size_t nbytes;
    Token token;
    std::size_t* arrived;
  };

  void send(int, int, const void* data, std::size_t nbytes, Token token) override {
    unsigned char read[kHeaderNbytes + kMostEager];
    require(nbytes <= sizeof read, "a message of too many bytes");
    if (nbytes) std::memcpy(read, data, nbytes);  // all of it must be there
    completed.push_back(token);
  }
  void receive(int peer, int tag, void* data, std::size_t nbytes, Token token, std::size_t* arrived) override {
    receives.push_back({peer, tag, static_cast<unsigned char*>(data), nbytes, token, arrived});
  }
  void poll(std::uint64_t, std::vector<Token>& found) override {
    found.insert(found.end(), completed.begin(), completed.end());
    completed.clear();
  }

  // A message for the first receive; false: there is none. A transport fails for one that is too long, and so does this.
  bool feed(int peer, int tag, const unsigned char* data, std::size_t nbytes) {
    const auto found = std::find_if(receives.begin(), receives.end(),
                                    [&](const Receive& each) { return each.peer == peer && each.tag == tag; });
    if (found == receives.end()) return false;
    const Receive to = *found;
    if (nbytes > to.nbytes || (!to.arrived && nbytes != to.nbytes)) return false;
    receives.erase(found);
    if (nbytes) std::memcpy(to.data, data, nbytes);
    if (to.arrived) *to.arrived = nbytes;
    completed.push_back(to.token);
    return true;
  }
  // A peer's first receive of data, or null.
  const Receive* first_of_data(int peer) const {
    for (const Receive& each : receives)
      if (each.peer == peer && each.tag != kControlTag) return &each;
    return nullptr;
  }

  std::vector<Receive> receives;
  std::vector<Token> completed;
};

// Reads what has been received, and writes an output.
struct Sum final : Operation {
  Sum(std::vector<std::pair<const unsigned char*, std::size_t>> from, unsigned char* to) : from(std::move(from)), to(to) {}
  void run() override {
    *to = 0;
    for (const auto& [data, nbytes] : from)
      for (std::size_t i = 0; i < nbytes; ++i) *to = static_cast<unsigned char>(*to + data[i]);
  }
  std::unique_ptr<Operation> copy() const override { return std::make_unique<Sum>(*this); }
  std::size_t nbytes() const override { return sizeof *this; }
  std::vector<std::pair<const unsigned char*, std::size_t>> from;
  unsigned char* to;
};

// Of a call: sends its data to the others, receives theirs, adds, sends the sum, and receives theirs.
struct Program {
  explicit Program(unsigned kind)
      : kind(kind), nbytes(kind == 0 ? 0 : kind == 1 ? 64 : kind == 2 ? kMostEager : kMostEager + 1) {
    steps = std::make_shared<Steps>(0, kRanks, kMostEager, kind & 1 ? std::vector<int>{1} : std::vector<int>{});
    if (nbytes) add();
    steps->link();
    header.replace(0, kCall.size(), kCall);
    header[kTextOffset] = static_cast<char>('0' + kind);
  }

  void add() {
    const auto at = [](const Bytes& bytes) { return reinterpret_cast<std::uintptr_t>(bytes.data()); };
    const auto own = memory.emplace(memory.end(), nbytes);
    std::vector<Number> received;
    std::vector<std::pair<const unsigned char*, std::size_t>> inputs;
    for (int round = 0; round < 2; ++round) {
      const std::vector<Number> needs = round ? std::vector<Number>{steps->count() - 1} : std::vector<Number>{};
      for (int peer = 1; peer < kRanks; ++peer) steps->add_transfer(true, peer, round, at(*own), nbytes, needs);
      received.clear();
      inputs.clear();
      for (int peer = 1; peer < kRanks; ++peer) {
        memory.emplace_back(nbytes);
        inputs.emplace_back(memory.back().data(), nbytes);
        received.push_back(steps->count());
        steps->add_transfer(false, peer, round, at(memory.back()), nbytes, {});
      }
      steps->add_operation(Sum(inputs, own->data()), received, round == 1);
    }
  }

  unsigned kind;
  std::size_t nbytes;
  std::deque<Bytes> memory;
  std::shared_ptr<Steps> steps;
  std::string header = std::string(kAgreedNbytes, '\0');
};

// The program of this kind for an input's call of this number. It is made once: most of an input's time would go there.
const Program& program(unsigned kind, std::size_t call) {
  static std::unique_ptr<Program> made[kPrograms][kMostCalls];
  auto& found = made[kind][call];
  if (!found) found = std::make_unique<Program>(kind);
  return *found;
}

// The kind of call for which a rank sends these bytes of a header from kTextOffset on, or kPrograms.
unsigned kind_of(const unsigned char* text) {
  constexpr std::size_t kTextNbytes = kAgreedNbytes - kTextOffset;
  unsigned kind = 0;
  while (kind < kPrograms && std::memcmp(text, program(kind, 0).header.data() + kTextOffset, kTextNbytes)) ++kind;
  return kind;
}

// A failure that a callback reports; the loop goes on for those who want to end in order.
struct Refusal {};

class Rank {
 public:
  Rank() : wire_(std::make_shared<FedWire>()), loop_(wire_, 0, kRanks, kMostEager, kCall) {}

  void act(Input& input) {
    switch (input.byte() % 6) {
      case 0: return call(input.byte() % kPrograms);
      case 1: return honest(input, false);
      case 2: return honest(input, true);
      case 3: return as_it_is(input);
      case 4: return data(input);
      default: return;
    }
  }

  // By some operations and polls.
  void advance(int turns) {
    Turn turn;
    turn.once = true;
    try {
      for (int i = 0; i < turns; ++i) loop_.advance(turn, on_control());
    } catch (...) {
      check_ended();
      throw;
    }
    check_ended();
  }

  void drain() { loop_.drain(0, on_control()); }

 private:
  static OnControl on_control() {
    return [](int, std::string_view message) {
      require(message.size() == kHeaderNbytes, "a control message of another size");
      throw Refusal();
    };
  }

  // As many calls are in flight as the engine allows.
  void call(unsigned kind) {
    if (loop_.active() && calls_.size() >= loop_.runs().front()->sequence() + kRunsInFlight) return;
    if (calls_.size() == kMostCalls) return;
    const Program& made = program(kind, calls_.size());
    const auto run = std::make_shared<Run>(made.steps, std::make_shared<Memory>(0));
    run->set_headers({made.header});
    calls_.push_back(&made);
    loop_.begin(run, calls_.size() - 1, 1e300, false, true, on_control());
    check_ended();
  }

  // The next header of a rank, which has made the call with these arguments, with its data or without; then changed.
  void honest(Input& input, bool is_changed) {
    const int peer = 1 + static_cast<int>(input.byte() % (kRanks - 1));
    const unsigned form = input.byte();
    const std::uint64_t sequence = headers_[peer];
    const Program* const call = sequence < calls_.size() ? calls_[sequence] : nullptr;
    std::vector<unsigned char> message(kHeaderNbytes, 0);
    std::memcpy(message.data(), kCall.data(), kCall.size());
    std::memcpy(message.data() + kSequenceOffset, &sequence, sizeof sequence);
    message[kTextOffset] = static_cast<unsigned char>('0' + (call ? call->kind : (form >> 1) % kPrograms));
    const std::size_t nbytes = call ? call->nbytes : 64;
    if (form & 1 && nbytes <= kMostEager) {
      message.resize(kHeaderNbytes + nbytes, static_cast<unsigned char>(form));
      const auto announced = static_cast<std::uint32_t>(nbytes);
      std::memcpy(message.data() + kAgreedNbytes, &announced, sizeof announced);
    }
    for (unsigned changes = is_changed ? input.byte() % 4 + 1 : 0; changes; --changes) change(message, input);
    deliver(peer, message);
  }

  static void change(std::vector<unsigned char>& message, Input& input) {
    const unsigned where = input.byte();
    if (where < 8 && !message.empty()) {
      message.resize(input.take<std::uint16_t>() % (kHeaderNbytes + kMostEager + 1));
    } else if (message.size() >= kHeaderNbytes) {
      static constexpr std::size_t kPlaces[] = {0, 4, 6, 8, 9, 15, 16, 17, 48, 200, 507, 508, 509, 510, 511};
      message[kPlaces[where % (sizeof kPlaces / sizeof *kPlaces)]] = static_cast<unsigned char>(input.byte());
    }
  }

  void as_it_is(Input& input) {
    const int peer = 1 + static_cast<int>(input.byte() % (kRanks - 1));
    std::vector<unsigned char> message(input.take<std::uint16_t>() % (kHeaderNbytes + kMostEager + 1));
    input.take(message.data(), std::min(message.size(), input.left()));
    deliver(peer, message);
  }

  void deliver(int peer, const std::vector<unsigned char>& message) {
    if (!wire_->feed(peer, kControlTag, message.data(), message.size())) return;
    std::uint64_t sequence = 0;
    if (message.size() >= kHeaderNbytes) std::memcpy(&sequence, message.data() + kSequenceOffset, sizeof sequence);
    if (message.size() >= kHeaderNbytes && !std::memcmp(message.data(), kCall.data(), kCall.size())) {
      if (sequence == headers_[peer]) ++headers_[peer];
      sent_[peer].push_back({sequence, kind_of(message.data() + kTextOffset)});
    }
  }

  void data(Input& input) {
    const int peer = 1 + static_cast<int>(input.byte() % (kRanks - 1));
    const FedWire::Receive* const receive = wire_->first_of_data(peer);
    if (!receive) return;
    const Bytes bytes(receive->nbytes, static_cast<int>(input.byte()));
    wire_->feed(peer, receive->tag, bytes.data(), bytes.size());
  }

  // No call has ended for which a rank has not sent the very header.
  void check_ended() {
    for (const std::uint64_t sequence : loop_.take_ended()) {
      require(sequence < calls_.size(), "a call has ended that was not made");
      const std::pair<std::uint64_t, unsigned> header{sequence, calls_[sequence]->kind};
      for (int peer = 1; peer < kRanks; ++peer)
        require(std::count(sent_[peer].begin(), sent_[peer].end(), header),
                "a call has ended, and a rank has not sent its header");
    }
    require(loop_.early() <= kRunsInFlight * kRanks, "headers of too many calls are kept");
  }

  std::shared_ptr<FedWire> wire_;
  std::vector<const Program*> calls_;
  std::uint64_t headers_[kRanks] = {};  // by rank: the number of its next honest header
  std::vector<std::pair<std::uint64_t, unsigned>> sent_[kRanks];  // by rank: the number and kind of call of each header
  Loop loop_;
};

}  // namespace

void fuzz(Input input) {
  Rank rank;
  int refusals = 0;
  for (int actions = 0; actions < 80 && !input.is_empty() && refusals < 3; ++actions) {
    try {
      rank.act(input);
      refusals ? rank.drain() : rank.advance(input.is_empty() ? 8 : 2);
    } catch (const MessageError&) {
      ++refusals;
    } catch (const Refusal&) {
      ++refusals;
    }
  }
}

}  // namespace fuzz
