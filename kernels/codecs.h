// The registry of codecs. Each codec has a folder, an include of its codec.h, and a name in QCCL_CODECS. A codec may also
// have host loops (host.h) or device code (device.h) of its own.
#pragma once

#include "codecs/cast/codec.h"
#include "codecs/dithering/codec.h"
#include "codecs/minmax/codec.h"
#include "codecs/none/codec.h"
#include "codecs/onebit/codec.h"
#include "codecs/randomk/codec.h"
#include "codecs/topk/codec.h"
#include "codecs/trellis/codec.h"

#if defined(QCCL_HOST_LOOPS)
#include "codecs/minmax/host.h"
#include "codecs/none/host.h"
#include "codecs/onebit/host.h"
#include "codecs/randomk/host.h"
#include "codecs/trellis/host.h"
#else
#include "codecs/cast/device.h"
#include "codecs/minmax/device.h"
#include "codecs/none/device.h"
#include "codecs/onebit/device.h"
#include "codecs/trellis/device.h"
#endif

#define QCCL_CODECS(each) \
  each(Cast) each(Dithering) each(MinMax) each(NoCodec) each(OneBit) each(RandomK) each(TopK) each(Trellis)
