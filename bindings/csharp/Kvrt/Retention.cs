// Compaction by hand, and what sequences have learnt of their queries.
using System;
using Kvrt.Native;

namespace Kvrt
{
    public sealed unsafe partial class Pool
    {
        /// <summary>Runs one round now: score, select, move survivors, return the emptied blocks.
        /// Inside an open step it runs at its end.</summary>
        /// <param name="sequence">The sequence.</param>
        /// <param name="policy">For this round only; null: the sequence's own.</param>
        public CompressReport Compress(Sequence sequence, Policy policy = null)
        {
            kv_policy native = policy == null ? default : NativePolicy.Describe(policy);
            kv_compress_options options = default;
            options.struct_size = (uint)sizeof(kv_compress_options);
            options.policy = policy == null ? null : &native;
            kv_compress_report report = default;
            report.struct_size = (uint)sizeof(kv_compress_report);
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeMethods.kv_compress(lease.Pool, sequence.Handle, &options, &report);
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
            return new CompressReport(report);
        }

        /// <summary>Reads what a sequence has gathered so far of the layer that the statistics
        /// name. </summary>
        public void GetStatistics(Sequence sequence, QueryStatistics statistics)
        {
            if (statistics == null)
            {
                throw new ArgumentNullException(nameof(statistics));
            }
            int status;
            PoolLease lease = Enter();
            try
            {
                fixed (float* real = statistics.MeanReal)
                fixed (float* imaginary = statistics.MeanImaginary)
                fixed (float* magnitude = statistics.MeanMagnitude)
                {
                    kv_query_statistics native = statistics.Describe(real, imaginary, magnitude);
                    status = NativeMethods.kv_seq_get_statistics(
                        lease.Pool, sequence.Handle, &native);
                    if (status >= 0)
                    {
                        statistics.Tokens = native.tokens;
                    }
                }
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
        }

        /// <summary>Writes what a sequence has gathered of every layer to a file.</summary>
        public void SaveStatistics(Sequence sequence, string path)
        {
            int status;
            byte[] terminated = Terminated(path);
            PoolLease lease = Enter();
            try
            {
                fixed (byte* bytes = terminated)
                {
                    status = NativeMethods.kv_seq_save_statistics(
                        lease.Pool, sequence.Handle, bytes);
                }
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
        }
    }

    /// <summary>What TriAttention knows of a layer's queries before rotation: per query head and
    /// band, the mean of the complex q and the mean of its magnitude. Arrays are [query_heads,
    /// bands]. </summary>
    public sealed unsafe class QueryStatistics
    {
        /// <summary>Statistics of zero queries.</summary>
        /// <param name="layer">Which layer.</param>
        /// <param name="queryHeads">The layer's query heads.</param>
        /// <param name="bands">rotated dimensions / 2 + dimensions that are not rotated.</param>
        public QueryStatistics(uint layer, uint queryHeads, uint bands)
        {
            ulong length = (ulong)queryHeads * bands;
            if (length == 0 || length > int.MaxValue / sizeof(float))
            {
                throw new KvrtArgumentException(
                    Status.Invalid, $"statistics of {queryHeads} heads and {bands} bands");
            }
            Layer = layer;
            QueryHeads = queryHeads;
            Bands = bands;
            MeanReal = new float[length];
            MeanImaginary = new float[length];
            MeanMagnitude = new float[length];
        }

        /// <summary>Which layer.</summary>
        public uint Layer { get; }

        /// <summary>The layer's query heads.</summary>
        public uint QueryHeads { get; }

        /// <summary>Bands of a head.</summary>
        public uint Bands { get; }

        /// <summary>How many queries were averaged.</summary>
        public ulong Tokens { get; set; }

        /// <summary>Real parts of the means.</summary>
        public float[] MeanReal { get; }

        /// <summary>Imaginary parts of the means.</summary>
        public float[] MeanImaginary { get; }

        /// <summary>Means of the magnitudes.</summary>
        public float[] MeanMagnitude { get; }

        internal kv_query_statistics Describe(float* real, float* imaginary, float* magnitude)
        {
            kv_query_statistics native = default;
            native.struct_size = (uint)sizeof(kv_query_statistics);
            native.layer = Layer;
            native.query_heads = QueryHeads;
            native.bands = Bands;
            native.tokens = Tokens;
            native.mean_real = real;
            native.mean_imaginary = imaginary;
            native.mean_magnitude = magnitude;
            return native;
        }
    }
}
