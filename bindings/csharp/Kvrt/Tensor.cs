// Views of the caller's memory as [rows, heads, dim]. A view is checked against its span when it is
// made, so that the library never reads or writes beyond it.
using System;
#if NET5_0_OR_GREATER
using System.Runtime.InteropServices;
#endif
using Kvrt.Native;

namespace Kvrt
{
    /// <summary>Where element [row, head, dim] of a tensor lies: offset + row * row stride + head *
    /// head stride + dim * dim stride, all in elements.</summary>
    public readonly struct TensorLayout
    {
        /// <summary>A dense tensor, which its span holds exactly.</summary>
        public TensorLayout(uint rows, uint heads, uint dim)
            : this(rows, heads, dim, 0, 0, 0) { }

        /// <summary>A view into a larger buffer, such as the keys in packed queries, keys and
        /// values. Strides may be negative; all 0: dense.</summary>
        public TensorLayout(uint rows, uint heads, uint dim, long rowStride, long headStride,
                            long dimStride, long offset = 0)
        {
            Rows = rows;
            Heads = heads;
            Dim = dim;
            RowStride = rowStride;
            HeadStride = headStride;
            DimStride = dimStride;
            Offset = offset;
        }

        /// <summary>Tokens.</summary>
        public uint Rows { get; }

        /// <summary>Heads.</summary>
        public uint Heads { get; }

        /// <summary>Dimensions of a head.</summary>
        public uint Dim { get; }

        /// <summary>Elements from one row to the next.</summary>
        public long RowStride { get; }

        /// <summary>Elements from one head to the next.</summary>
        public long HeadStride { get; }

        /// <summary>Elements from one dimension to the next.</summary>
        public long DimStride { get; }

        /// <summary>Where element [0, 0, 0] lies.</summary>
        public long Offset { get; }

        private bool IsDense => RowStride == 0 && HeadStride == 0 && DimStride == 0;

        /// <summary>Throws unless every element lies in a span of so many.</summary>
        internal void CheckAgainst(int length)
        {
            bool fits;
            try
            {
                fits = IsDense && Offset == 0 ? checked((long)Rows * Heads * Dim) == length
                                              : ReachesWithin(length);
            }
            catch (OverflowException)
            {
                fits = false;
            }
            if (!fits)
            {
                throw new KvrtArgumentException(Status.Invalid,
                    $"a span of {length} elements does not hold [{Rows}, {Heads}, {Dim}] with " +
                    $"strides [{RowStride}, {HeadStride}, {DimStride}] and offset {Offset}" +
                    (IsDense && Offset == 0 ? ": a dense tensor fills its span" : ""));
            }
        }

        /// <summary>Throws unless each axis steps over all that the narrower ones cover, so that
        /// no two elements share a place. For layouts that fit their spans: nothing overflows.
        /// </summary>
        internal void CheckApart()
        {
            if (IsDense || Rows == 0 || Heads == 0 || Dim == 0)
            {
                return;
            }
            var narrow = new Axis(Dim, DimStride);
            var middle = new Axis(Heads, HeadStride);
            var wide = new Axis(Rows, RowStride);
            Axis.Order(ref narrow, ref middle);
            Axis.Order(ref middle, ref wide);
            Axis.Order(ref narrow, ref middle);
            long covered = 0;
            if (!narrow.StepsOver(ref covered) || !middle.StepsOver(ref covered) ||
                !wide.StepsOver(ref covered))
            {
                throw new KvrtArgumentException(Status.Invalid,
                    $"with strides [{RowStride}, {HeadStride}, {DimStride}] elements of " +
                    $"[{Rows}, {Heads}, {Dim}] lie on each other: each needs a place of its own");
            }
        }

        private readonly struct Axis
        {
            private readonly uint count;
            private readonly long step; // 0: there is but one element

            public Axis(uint count, long stride)
            {
                this.count = count;
                step = count == 1 ? 0 : Math.Abs(stride);
            }

            public static void Order(ref Axis narrow, ref Axis wide)
            {
                if (narrow.step > wide.step)
                {
                    Axis swapped = narrow;
                    narrow = wide;
                    wide = swapped;
                }
            }

            public bool StepsOver(ref long covered)
            {
                if (count == 1)
                {
                    return true;
                }
                bool over = step > covered;
                covered += (count - 1) * step;
                return over;
            }
        }

        private bool ReachesWithin(int length)
        {
            if (Rows == 0 || Heads == 0 || Dim == 0)
            {
                return true;
            }
            long dimStride = IsDense ? 1 : DimStride;
            long headStride = IsDense ? Dim : HeadStride;
            long rowStride = IsDense ? checked((long)Heads * Dim) : RowStride;
            long lowest = Offset;
            long highest = Offset;
            Extend(Rows, rowStride, ref lowest, ref highest);
            Extend(Heads, headStride, ref lowest, ref highest);
            Extend(Dim, dimStride, ref lowest, ref highest);
            return lowest >= 0 && highest < length;
        }

        private static void Extend(uint count, long stride, ref long lowest, ref long highest)
        {
            long reach = checked((count - 1L) * stride);
            if (reach < 0)
            {
                lowest = checked(lowest + reach);
            }
            else
            {
                highest = checked(highest + reach);
            }
        }
    }

    /// <summary>A tensor that the library reads: queries, keys, values.</summary>
    public readonly ref struct ReadOnlyTensor
    {
        internal readonly ReadOnlySpan<float> Floats; // one of the two is empty
        internal readonly ReadOnlySpan<ushort> Halves;
        internal readonly TensorLayout Layout;
        private readonly DataType type;

        private ReadOnlyTensor(ReadOnlySpan<float> floats, ReadOnlySpan<ushort> halves,
                               DataType type, in TensorLayout layout)
        {
            layout.CheckAgainst(type == DataType.Float32 ? floats.Length : halves.Length);
            Floats = floats;
            Halves = halves;
            Layout = layout;
            this.type = type;
        }

        /// <summary>A view of 32-bit floats.</summary>
        public static ReadOnlyTensor Float32(ReadOnlySpan<float> data, TensorLayout layout)
        {
            return new ReadOnlyTensor(data, default, DataType.Float32, layout);
        }

        /// <summary>A view of the bits of IEEE 754 half precision.</summary>
        public static ReadOnlyTensor Float16(ReadOnlySpan<ushort> data, TensorLayout layout)
        {
            return new ReadOnlyTensor(default, data, DataType.Float16, layout);
        }

        /// <summary>A view of the upper halves of 32-bit floats.</summary>
        public static ReadOnlyTensor BFloat16(ReadOnlySpan<ushort> data, TensorLayout layout)
        {
            return new ReadOnlyTensor(default, data, DataType.BFloat16, layout);
        }

#if NET5_0_OR_GREATER
        /// <summary>A view of IEEE 754 half precision.</summary>
        public static ReadOnlyTensor Float16(ReadOnlySpan<Half> data, TensorLayout layout)
        {
            return Float16(MemoryMarshal.Cast<Half, ushort>(data), layout);
        }
#endif

        /// <summary>For a call in which both spans are pinned; the empty one's pointer is NULL.
        /// </summary>
        internal unsafe kv_tensor Describe(float* floats, ushort* halves)
        {
            kv_tensor tensor = default;
            tensor.struct_size = (uint)sizeof(kv_tensor);
            tensor.data = floats != null ? (void*)(floats + Layout.Offset)
                        : halves != null ? (void*)(halves + Layout.Offset) : null;
            tensor.dtype = (uint)type;
            tensor.rows = Layout.Rows;
            tensor.heads = Layout.Heads;
            tensor.dim = Layout.Dim;
            tensor.row_stride = Layout.RowStride;
            tensor.head_stride = Layout.HeadStride;
            tensor.dim_stride = Layout.DimStride;
            return tensor;
        }
    }

    /// <summary>A tensor that the library writes: the results of attention. No two of its elements
    /// lie on each other.</summary>
    public readonly ref struct Tensor
    {
        internal readonly ReadOnlyTensor View;

        private Tensor(ReadOnlyTensor view)
        {
            view.Layout.CheckApart();
            View = view;
        }

        /// <summary>A view of 32-bit floats.</summary>
        public static Tensor Float32(Span<float> data, TensorLayout layout)
        {
            return new Tensor(ReadOnlyTensor.Float32(data, layout));
        }

        /// <summary>A view of the bits of IEEE 754 half precision.</summary>
        public static Tensor Float16(Span<ushort> data, TensorLayout layout)
        {
            return new Tensor(ReadOnlyTensor.Float16(data, layout));
        }

        /// <summary>A view of the upper halves of 32-bit floats.</summary>
        public static Tensor BFloat16(Span<ushort> data, TensorLayout layout)
        {
            return new Tensor(ReadOnlyTensor.BFloat16(data, layout));
        }

#if NET5_0_OR_GREATER
        /// <summary>A view of IEEE 754 half precision.</summary>
        public static Tensor Float16(Span<Half> data, TensorLayout layout)
        {
            return Float16(MemoryMarshal.Cast<Half, ushort>(data), layout);
        }
#endif
    }
}
