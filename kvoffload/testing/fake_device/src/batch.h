// What the stand-ins for drivers share: checking many copies, and enqueuing them as one call.
#pragma once
#include <algorithm>
#include <cstring>
#include <functional>

#include "runtime.h"

namespace fake {

struct Piece {
  Span dst, src;
  size_t size;
  std::shared_ptr<const std::vector<char>> early = nullptr;  // what the source held at the call
};

// One copy of a batch is wrong.
struct PieceError : Error {
  PieceError(size_t index, const std::string& what)
      : Error("copy " + std::to_string(index) + ": " + what), index(index) {}
  size_t index;
};

// Throws what is wrong with a batch; `any_order` tells whether a source may be read at any time. Such a
// source is read now: hardware may, and whoever relies on a later moment is wrong.
inline std::vector<Piece> check_batch(const uintptr_t* dsts, const uintptr_t* srcs,
                                      const size_t* sizes, size_t count,
                                      const std::function<bool(size_t)>& any_order) {
  std::vector<Piece> pieces;
  std::vector<std::pair<uintptr_t, uintptr_t>> written;  // from, to
  pieces.reserve(count);
  written.reserve(count);
  for (size_t i = 0; i < count; i++) {
    try {
      if (sizes[i] == 0) throw Error("a copy of no bytes");
      Piece piece{Span(reinterpret_cast<void*>(dsts[i]), sizes[i]),
                  Span(reinterpret_cast<void*>(srcs[i]), sizes[i]), sizes[i]};
      if (!piece.dst.known() || !piece.src.known())
        throw Error("neither device memory nor registered host memory");
      // A read in any order may also come first: what the device still writes is then torn.
      const bool now = any_order(i);
      if (now && piece.src.on_device())
        throw Error("device memory must be read in the order of the stream");
      if (now) {
        const auto source = piece.src.open();
        piece.early = std::make_shared<const std::vector<char>>(source.data(), source.data() + sizes[i]);
      }
      pieces.push_back(std::move(piece));
    } catch (const Error& error) {
      throw PieceError(i, error.what());
    }
    written.emplace_back(dsts[i], dsts[i] + sizes[i]);
  }
  std::sort(written.begin(), written.end());
  for (size_t i = 1; i < count; i++)
    if (written[i].first < written[i - 1].second)
      throw Error("two copies of one batch write the same bytes");
  for (size_t i = 0; i < count; i++) {  // they run in no order
    const auto after = std::lower_bound(written.begin(), written.end(),
                                        std::pair<uintptr_t, uintptr_t>(srcs[i] + sizes[i], 0));
    if (after != written.begin() && std::prev(after)->second > srcs[i])
      throw Error("a copy of the batch reads what the batch writes");
  }
  return pieces;
}

// One call's copies, as one piece of work; throws if the stream was told to refuse it.
inline void push_copies(Stream& stream, const char* what, std::vector<Piece> pieces) {
  auto& counts = counters();
  const auto n = static_cast<int64_t>(pieces.size());
  stream.push(what, [pieces = std::move(pieces)] {
    for (const Piece& piece : pieces) {
      const auto source = piece.src.open();
      const char* data = piece.early ? piece.early->data() : source.data();
      memcpy(piece.dst.open().data(), data, piece.size);
      counters().copied_bytes += static_cast<int64_t>(piece.size);
    }
  });
  counts.copies += n;
  counts.copy_calls++;
  int64_t largest = counts.largest_call;
  while (n > largest && !counts.largest_call.compare_exchange_weak(largest, n)) {
  }
}

}  // namespace fake
