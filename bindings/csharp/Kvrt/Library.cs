// What can be asked of the library without a pool: version, capabilities, statuses, live counts.
using System;
using System.Runtime.CompilerServices;
using System.Text;
using Kvrt.Native;

namespace Kvrt
{
    /// <summary>The loaded library. Every member may be used by any thread at any time.</summary>
    public static unsafe class Library
    {
        /// <summary>major * 10000 + minor * 100 + patch of the library that is loaded.</summary>
        public static uint Version
        {
            get
            {
                NativeLoader.Load();
                return Loaded.Version();
            }
        }

        /// <summary>What the library at hand can do.</summary>
        public static Capabilities GetCapabilities()
        {
            NativeLoader.Load();
            return Loaded.GetCapabilities();
        }

        /// <summary>The header's name of a status, such as KV_AGAIN.</summary>
        public static string NameOf(Status status)
        {
            NativeLoader.Load();
            return Loaded.NameOf(status);
        }

        /// <summary>The category of a status, known or not.</summary>
        public static Category CategoryOf(Status status)
        {
            NativeLoader.Load();
            return Loaded.CategoryOf(status);
        }

        /// <summary>How many objects of a kind are alive in this process, over all pools.</summary>
        public static ulong LiveCount(LiveKind kind)
        {
            NativeLoader.Load();
            return Loaded.LiveCount(kind);
        }

        /// <summary>The calls themselves, which are compiled once the library is there.</summary>
        private static class Loaded
        {
            [MethodImpl(MethodImplOptions.NoInlining)]
            public static uint Version() => NativeMethods.kvrt_version();

            [MethodImpl(MethodImplOptions.NoInlining)]
            public static string NameOf(Status status)
            {
                return Text(NativeMethods.kv_status_name((int)status));
            }

            [MethodImpl(MethodImplOptions.NoInlining)]
            public static Category CategoryOf(Status status)
            {
                return (Category)NativeMethods.kv_status_category((int)status);
            }

            [MethodImpl(MethodImplOptions.NoInlining)]
            public static ulong LiveCount(LiveKind kind) => NativeMethods.kv_live_count((uint)kind);

            [MethodImpl(MethodImplOptions.NoInlining)]
            public static Capabilities GetCapabilities()
            {
                kv_capabilities_report report = default;
                report.struct_size = (uint)sizeof(kv_capabilities_report);
                int status = NativeMethods.kv_capabilities(&report);
                if (status < 0)
                {
                    KvrtException.Throw(status, null);
                }
                return new Capabilities(report);
            }
        }

        /// <summary>A terminated string of the library.</summary>
        internal static string Text(byte* text)
        {
            int length = 0;
            while (text[length] != 0)
            {
                ++length;
            }
            return Encoding.UTF8.GetString(text, length);
        }
    }

    /// <summary>What a library can do: <see cref="Library.GetCapabilities"/>.</summary>
    public readonly struct Capabilities
    {
        private readonly kv_capabilities_report report;

        internal unsafe Capabilities(kv_capabilities_report report)
        {
            this.report = report;
            SimdTarget = Library.Text(report.simd_target);
        }

        /// <summary>What the kernels run on here, such as AVX3_ZEN4.</summary>
        public string SimdTarget { get; }

        /// <summary>The smallest dimension of a head.</summary>
        public uint MinHeadDim => report.min_head_dim;

        /// <summary>The largest dimension of a head.</summary>
        public uint MaxHeadDim => report.max_head_dim;

        /// <summary>Dimensions of heads are multiples of this.</summary>
        public uint HeadDimMultiple => report.head_dim_multiple;

        /// <summary>The most layers of a model.</summary>
        public uint MaxLayers => report.max_layers;

        /// <summary>Whether keys can be stored so; values too, but for
        /// <see cref="StorageFormat.Affine4"/>.</summary>
        public bool Supports(StorageFormat format) => Holds(report.formats, (uint)format);

        /// <summary>Whether pools can live there.</summary>
        public bool Supports(Device device) => Holds(report.devices, (uint)device);

        /// <summary>Whether blocks can lie so.</summary>
        public bool Supports(BlockLayout layout) => Holds(report.layouts, (uint)layout);

        /// <summary>Whether policies can rank so.</summary>
        public bool Supports(Scorer scorer) => Holds(report.scorers, (uint)scorer);

        /// <summary>Whether policies can select so.</summary>
        public bool Supports(Selection selection) => Holds(report.selections, (uint)selection);

        private static bool Holds(ulong bits, uint bit) => bit < 64 && (bits >> (int)bit & 1) != 0;
    }
}
