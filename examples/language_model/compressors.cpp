#include "compressors.h"

#include <lzma.h>
#include <zlib.h>

namespace language_model {
namespace {

size_t xz_size(const Bytes& text) {
  Bytes out(lzma_stream_buffer_bound(text.size()));
  size_t size = 0;
  if (lzma_easy_buffer_encode(9, LZMA_CHECK_CRC64, nullptr, text.data(), text.size(), out.data(), &size, out.size()) !=
      LZMA_OK)
    throw std::runtime_error("liblzma could not compress the text");
  return size;
}

}  // namespace

double gzip_bits_per_byte(const Bytes& text) {
  z_stream stream{};
  constexpr int kGzipFormat = 16, kWindow = 15, kMemory = 8;
  if (deflateInit2(&stream, 9, Z_DEFLATED, kGzipFormat + kWindow, kMemory, Z_DEFAULT_STRATEGY) != Z_OK)
    throw std::runtime_error("zlib could not start");
  Bytes out(deflateBound(&stream, uLong(text.size())));
  stream.next_in = const_cast<Bytef*>(text.data());
  stream.avail_in = uInt(text.size());
  stream.next_out = out.data();
  stream.avail_out = uInt(out.size());
  int status = deflate(&stream, Z_FINISH);
  double bits = double(stream.total_out) * 8;
  deflateEnd(&stream);
  if (status != Z_STREAM_END) throw std::runtime_error("zlib could not compress the text");
  return bits / double(text.size());
}

double xz_bits_per_byte(const Bytes& text, const Bytes& before) {
  Bytes both = before;
  both.insert(both.end(), text.begin(), text.end());
  return (double(xz_size(both)) - double(xz_size(before))) * 8 / double(text.size());
}

}  // namespace language_model
