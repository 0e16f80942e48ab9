// Traces: what a model handed to its cache for some requests and what it got back. The format is
// in docs/trace.md. Tensors are views of the file's bytes.
using System;
using System.Collections.Generic;
using System.Runtime.InteropServices;
using Kvrt;

namespace Batching
{
    /// <summary>What is wrong with a file, in a sentence.</summary>
    public sealed class TraceException : Exception
    {
        public TraceException(string message) : base(message) { }
    }

    /// <summary>A recording of some layers of a model.</summary>
    public sealed class Trace
    {
        public uint QueryHeads { get; set; }
        public uint KvHeads { get; set; }
        public uint HeadDim { get; set; }
        public StorageFormat Format { get; set; }
        public RopeStyle RopeStyle { get; set; }

        /// <summary>Of the rotated pairs; empty without rotation.</summary>
        public double[] InverseFrequencies { get; set; }

        /// <summary>Which layers of the model these are.</summary>
        public uint[] LayerNumbers { get; set; }

        /// <summary>For all requests; null: nothing is ever removed. Prompts' lengths
        /// differ.</summary>
        public Policy Policy { get; set; }

        public List<TraceRequest> Requests { get; } = new List<TraceRequest>();

        /// <summary>Elements of a row of queries or outputs.</summary>
        public int QuerySize => (int)(QueryHeads * HeadDim);

        /// <summary>Elements of a row of keys or values.</summary>
        public int KvSize => (int)(KvHeads * HeadDim);
    }

    /// <summary>One sequence, from its creation to its release.</summary>
    public sealed class TraceRequest
    {
        public uint PromptTokens { get; set; }

        /// <summary>Rounds of compaction that removed something.</summary>
        public uint Rounds { get; set; }

        /// <summary>Tokens accepted in all.</summary>
        public uint Seen { get; set; }

        /// <summary>Tokens that each layer holds at the end.</summary>
        public uint[] Retained { get; set; }

        public List<TraceTurn> Turns { get; } = new List<TraceTurn>();
    }

    /// <summary>What a request brought to one step: a part of its prompt, or a token with drafts
    /// behind it.</summary>
    public sealed class TraceTurn
    {
        private readonly byte[] file;
        private readonly int tensors; // where those of the first layer begin
        private readonly int querySize, kvSize;

        /// <param name="file">The whole trace.</param>
        /// <param name="tensors">Where this turn's begin in it, after its token ids.</param>
        /// <param name="rows">Tokens.</param>
        /// <param name="trace">For the sizes of rows.</param>
        public TraceTurn(byte[] file, int tensors, uint rows, Trace trace)
        {
            this.file = file;
            this.tensors = tensors;
            Rows = rows;
            querySize = trace.QuerySize;
            kvSize = trace.KvSize;
        }

        public uint Rows { get; }

        /// <summary>The first so many rows stayed.</summary>
        public uint Accepted { get; set; }

        /// <summary>The last so many rows have outputs.</summary>
        public uint OutputRows { get; set; }

        public ReadOnlySpan<uint> TokenIds => View<uint>(tensors - 4L * Rows, Rows);

        /// <summary>Bytes of a layer's tensors.</summary>
        public long LayerBytes => QueryBytes + 2 * KvBytes + 4L * OutputRows * querySize;

        private long QueryBytes => 2L * Rows * querySize;

        private long KvBytes => 2L * Rows * kvSize;

        /// <summary>[rows, query_heads, head_dim], half precision.</summary>
        public ReadOnlySpan<ushort> Queries(int layer)
        {
            return View<ushort>(Start(layer), (long)Rows * querySize);
        }

        /// <summary>[rows, kv_heads, head_dim], half precision.</summary>
        public ReadOnlySpan<ushort> Keys(int layer)
        {
            return View<ushort>(Start(layer) + QueryBytes, (long)Rows * kvSize);
        }

        /// <summary>[rows, kv_heads, head_dim], half precision.</summary>
        public ReadOnlySpan<ushort> Values(int layer)
        {
            return View<ushort>(Start(layer) + QueryBytes + KvBytes, (long)Rows * kvSize);
        }

        /// <summary>[output rows, query_heads, head_dim]</summary>
        public ReadOnlySpan<float> Outputs(int layer)
        {
            return View<float>(Start(layer) + QueryBytes + 2 * KvBytes,
                               (long)OutputRows * querySize);
        }

        private long Start(int layer) => tensors + layer * LayerBytes;

        private ReadOnlySpan<T> View<T>(long offset, long count) where T : struct
        {
            Span<byte> rest = file.AsSpan(checked((int)offset));
            return MemoryMarshal.Cast<byte, T>(rest).Slice(0, checked((int)count));
        }
    }
}
