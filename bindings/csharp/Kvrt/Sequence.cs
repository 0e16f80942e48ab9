// Sequences are values, and what the pool does with them.
using System;
using Kvrt.Native;

namespace Kvrt
{
    /// <summary>One request's cache in a pool: a number that the pool checks. One that was released
    /// gives <see cref="Status.Stale"/>; the default one is never valid.</summary>
    public readonly struct Sequence : IEquatable<Sequence>
    {
        /// <summary>The sequence that kv_seq numbers so.</summary>
        public Sequence(ulong handle)
        {
            Handle = handle;
        }

        /// <summary>The kv_seq.</summary>
        public ulong Handle { get; }

        /// <summary>Whether both are the same sequence.</summary>
        public bool Equals(Sequence other) => Handle == other.Handle;

        /// <inheritdoc/>
        public override bool Equals(object other) => other is Sequence && Equals((Sequence)other);

        /// <inheritdoc/>
        public override int GetHashCode() => Handle.GetHashCode();

        /// <inheritdoc/>
        public override string ToString() => "sequence 0x" + Handle.ToString("x16");

        /// <summary>Whether both are the same sequence.</summary>
        public static bool operator ==(Sequence left, Sequence right) => left.Equals(right);

        /// <summary>Whether both are different sequences.</summary>
        public static bool operator !=(Sequence left, Sequence right) => !left.Equals(right);
    }

    public sealed unsafe partial class Pool
    {
        /// <summary>Begins a sequence.</summary>
        /// <param name="policy">Copied; null: keep everything.</param>
        /// <param name="userData">Returned by <see cref="GetInfo"/>.</param>
        /// <param name="gatherStatistics">Gather statistics of queries also without a policy that
        /// needs them.</param>
        public Sequence CreateSequence(
            Policy policy = null, ulong userData = 0, bool gatherStatistics = false)
        {
            kv_policy nativePolicy = policy == null ? default : NativePolicy.Describe(policy);
            kv_seq_config config = default;
            config.struct_size = (uint)sizeof(kv_seq_config);
            config.flags = gatherStatistics ? NativeConstants.KV_SEQ_GATHER_STATISTICS : 0;
            config.policy = policy == null ? null : &nativePolicy;
            config.user_data = userData;
            ulong sequence = 0;
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeMethods.kv_seq_create(lease.Pool, &config, &sequence);
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
            return new Sequence(sequence);
        }

        /// <summary>Ends a sequence, in any state. Releasing it again does nothing.</summary>
        public void ReleaseSequence(Sequence sequence)
        {
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeMethods.kv_seq_release(lease.Pool, sequence.Handle);
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
        }

        /// <summary>Makes a child with the parent's accepted tokens, policy and statistics. Nothing
        /// is copied until one of them writes.</summary>
        public Sequence Fork(Sequence parent)
        {
            ulong child = 0;
            ForkInto(parent, 1, &child);
            return new Sequence(child);
        }

        /// <summary>Makes as many children as there is room for in the span: all or none.</summary>
        public void Fork(Sequence parent, Span<Sequence> children)
        {
            fixed (Sequence* handles = children)
            {
                ForkInto(parent, (uint)children.Length, (ulong*)handles);
            }
        }

        private void ForkInto(Sequence parent, uint count, ulong* children)
        {
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeMethods.kv_seq_fork(lease.Pool, parent.Handle, count, children);
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
        }

        /// <summary>Forgets all tokens from position tokensSeen on, which becomes the next
        /// position. <see cref="Status.NoSnapshot"/>: what lies before is no longer
        /// stored.</summary>
        public void Truncate(Sequence sequence, ulong tokensSeen)
        {
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeMethods.kv_seq_truncate(lease.Pool, sequence.Handle, tokensSeen);
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
        }

        /// <summary>Replaces the policy; null: none.</summary>
        public void SetPolicy(Sequence sequence, Policy policy)
        {
            kv_policy native = policy == null ? default : NativePolicy.Describe(policy);
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeMethods.kv_seq_set_policy(
                    lease.Pool, sequence.Handle, policy == null ? null : &native);
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
        }

        /// <summary>Protects positions [first, first + count) from every policy.</summary>
        public void Pin(Sequence sequence, ulong first, ulong count)
        {
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeMethods.kv_seq_pin(lease.Pool, sequence.Handle, first, count);
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
        }

        /// <summary>Removes all ranges that were pinned.</summary>
        public void Unpin(Sequence sequence)
        {
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeMethods.kv_seq_unpin(lease.Pool, sequence.Handle);
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
        }

        /// <summary>A sequence's lengths and blocks.</summary>
        public SequenceInfo GetInfo(Sequence sequence)
        {
            kv_seq_info info = default;
            info.struct_size = (uint)sizeof(kv_seq_info);
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeMethods.kv_seq_get_info(lease.Pool, sequence.Handle, &info);
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
            return new SequenceInfo(info);
        }

        /// <summary>What one layer holds of a sequence.</summary>
        public SequenceLayerInfo GetLayerInfo(Sequence sequence, uint layer)
        {
            kv_seq_layer_info info = default;
            info.struct_size = (uint)sizeof(kv_seq_layer_info);
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeMethods.kv_seq_get_layer_info(
                    lease.Pool, sequence.Handle, layer, &info);
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
            return new SequenceLayerInfo(info);
        }

        /// <summary>Writes the positions of the retained tokens of one KV head, ascending, as far
        /// as there is room, and returns how many there are.</summary>
        public ulong GetPositions(
            Sequence sequence, uint layer, uint kvHead, Span<uint> positions)
        {
            ulong count = 0;
            int status;
            PoolLease lease = Enter();
            try
            {
                fixed (uint* room = positions)
                {
                    status = NativeMethods.kv_seq_get_positions(
                        lease.Pool, sequence.Handle, layer, kvHead, (ulong)positions.Length, room,
                        &count);
                }
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
            return count;
        }
    }
}
