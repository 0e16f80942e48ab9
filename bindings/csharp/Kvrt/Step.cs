// Steps: one forward pass over a batch, as a transaction.
using System;
using System.Threading;
using Kvrt.Native;

namespace Kvrt
{
    /// <summary>Switches of <see cref="Step.Attend"/>.</summary>
    [Flags]
    public enum AttendOptions : uint
    {
        /// <summary>None of them.</summary>
        None = 0,
        /// <summary>Do not learn statistics of queries from this call.</summary>
        NoStatistics = NativeConstants.KV_ATTEND_NO_STATISTICS
    }

    /// <summary>What the pool knows of one of the library's step handles, which are few and go
    /// round: a step that has ended is told from the one that has its handle now by its number.
    /// In a thread-safe pool all is done in turn, so that no other step gets the handle between a
    /// look at the number and the call that relies on it.</summary>
    internal sealed class StepSlot
    {
        public readonly IntPtr Handle;
        private long number;
        private long endFailed;

        public StepSlot(IntPtr handle)
        {
            Handle = handle;
        }

        /// <summary>Of the step that is open under this handle; 0: none.</summary>
        public long Number
        {
            get { return Volatile.Read(ref number); }
            set { Volatile.Write(ref number, value); }
        }

        /// <summary>The step whose End was last refused in a pool without turns. It is cancelled
        /// then, unless another thread was inside a call; only the library knows.</summary>
        public long EndFailed
        {
            get { return Volatile.Read(ref endFailed); }
            set { Volatile.Write(ref endFailed, value); }
        }

        /// <summary>This step has ended, but not the one that has the handle by now.</summary>
        public void Close(long step)
        {
            Interlocked.CompareExchange(ref number, 0, step);
        }
    }

    public sealed unsafe partial class Pool
    {
        /// <summary>Opens a step. Up to two are open at once, over different sequences.</summary>
        public Step BeginStep()
        {
            IntPtr handle = IntPtr.Zero;
            int status;
            Step step = default;
            PoolLease lease = EnterStep();
            try
            {
                status = NativeMethods.kv_step_begin(lease.Pool, &handle);
                if (status >= 0)
                {
                    step = Number(handle);
                }
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
            return step;
        }

        private Step Number(IntPtr handle)
        {
            lock (stepSlots)
            {
                StepSlot slot = SlotOf(handle);
                slot.Number = ++stepsBegun;
                return new Step(this, slot, stepsBegun);
            }
        }

        private StepSlot SlotOf(IntPtr step)
        {
            foreach (StepSlot known in stepSlots)
            {
                if (known.Handle == step)
                {
                    return known;
                }
            }
            var slot = new StepSlot(step);
            stepSlots.Add(slot);
            return slot;
        }
    }

    /// <summary>An open step of a pool. Append sequences, reserve, write and attend every layer,
    /// end. Disposing cancels a step that has not ended. After that, and after its pool is
    /// disposed, it gives ObjectDisposedException. Copies are the same step.</summary>
    public readonly unsafe partial struct Step : IDisposable
    {
        private readonly Pool pool;
        private readonly StepSlot slot;
        private readonly long number;

        internal Step(Pool pool, StepSlot slot, long number)
        {
            this.pool = pool;
            this.slot = slot;
            this.number = number;
        }

        /// <summary>Whether it was neither ended nor cancelled by a call that succeeded.</summary>
        public bool IsOpen => pool != null && slot.Number == number;

        /// <summary>Adds tokens of a sequence: a chunk of a prompt, a token, a token with drafts
        /// behind it. Rows follow in the order of the calls.</summary>
        public AppendInfo Append(Sequence sequence, uint count)
        {
            return Append(sequence, null, count);
        }

        /// <summary>Adds tokens of a sequence, with their ids.</summary>
        public AppendInfo Append(Sequence sequence, ReadOnlySpan<uint> tokenIds)
        {
            fixed (uint* ids = tokenIds)
            {
                return Append(sequence, ids, (uint)tokenIds.Length);
            }
        }

        private AppendInfo Append(Sequence sequence, uint* tokenIds, uint count)
        {
            kv_append_info info = default;
            info.struct_size = (uint)sizeof(kv_append_info);
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeMethods.kv_seq_append(
                    slot.Handle, sequence.Handle, tokenIds, count, &info);
            }
            finally
            {
                lease.Release();
            }
            pool.Finish(status);
            return new AppendInfo(info);
        }

        /// <summary>Adds counts[i] tokens of sequences[i]: all, or none.</summary>
        /// <param name="sequences">The sequences.</param>
        /// <param name="counts">As many as there are sequences.</param>
        /// <param name="tokenIds">Those of all sequences one behind the other; or empty.</param>
        /// <param name="infos">Filled for each sequence; or empty.</param>
        public void AppendBatch(
            ReadOnlySpan<Sequence> sequences, ReadOnlySpan<uint> counts,
            ReadOnlySpan<uint> tokenIds = default, Span<AppendInfo> infos = default)
        {
            CheckLength(counts.Length, sequences.Length, "counts");
            if (tokenIds.Length != 0)
            {
                CheckTokens(counts, tokenIds.Length);
            }
            if (infos.Length != 0)
            {
                CheckLength(infos.Length, sequences.Length, "infos");
            }
            int status;
            PoolLease lease = Enter();
            try
            {
                fixed (Sequence* handles = sequences)
                fixed (uint* numbers = counts)
                fixed (uint* ids = tokenIds)
                fixed (AppendInfo* results = infos)
                {
                    for (int i = 0; i < infos.Length; ++i)
                    {
                        results[i] = AppendInfo.Empty;
                    }
                    status = NativeMethods.kv_step_append_batch(
                        slot.Handle, (uint)sequences.Length, (ulong*)handles, numbers, ids,
                        (kv_append_info*)results);
                }
            }
            finally
            {
                lease.Release();
            }
            pool.Finish(status);
        }

        /// <summary>Reserves slots for all that was appended, or throws.</summary>
        /// <param name="itemStatuses">Filled with a status per item, also before a throw; or empty.
        /// </param>
        public ReserveReport Reserve(Span<Status> itemStatuses = default)
        {
            int status = Reserve(itemStatuses, out ReserveReport report);
            pool.Finish(status);
            return report;
        }

        /// <summary>Reserves slots for all that was appended. False: not now
        /// (<see cref="Status.Again"/>), and the step stays open: release or compress others, or
        /// take items out with <see cref="Remove"/>, and try again. Other errors throw.</summary>
        public bool TryReserve(out ReserveReport report, Span<Status> itemStatuses = default)
        {
            int status = Reserve(itemStatuses, out report);
            pool.Finish(status == NativeConstants.KV_AGAIN ? NativeConstants.KV_OK : status);
            return status != NativeConstants.KV_AGAIN;
        }

        private int Reserve(Span<Status> itemStatuses, out ReserveReport report)
        {
            kv_reserve_report native = default;
            native.struct_size = (uint)sizeof(kv_reserve_report);
            native.item_status_capacity = (uint)itemStatuses.Length;
            int status;
            PoolLease lease = Enter();
            try
            {
                fixed (Status* statuses = itemStatuses)
                {
                    native.item_statuses = (int*)statuses;
                    status = NativeMethods.kv_step_reserve(slot.Handle, &native);
                    native.item_statuses = null;
                }
            }
            finally
            {
                lease.Release();
            }
            report = new ReserveReport(native);
            return status;
        }

        /// <summary>Takes a sequence out of a step that has not been reserved. Items and rows
        /// behind it move up.</summary>
        public void Remove(Sequence sequence)
        {
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeMethods.kv_step_remove(slot.Handle, sequence.Handle);
            }
            finally
            {
                lease.Release();
            }
            pool.Finish(status);
        }

        /// <summary>Accepts the first tokens that the sequence appended; the others are rolled back
        /// when the step ends. Without this: all.</summary>
        public void Accept(Sequence sequence, uint count)
        {
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeMethods.kv_step_accept(slot.Handle, sequence.Handle, count);
            }
            finally
            {
                lease.Release();
            }
            pool.Finish(status);
        }

        /// <summary>Accepts the first counts[i] tokens of sequences[i]: all are noted, or none.
        /// </summary>
        public void AcceptBatch(ReadOnlySpan<Sequence> sequences, ReadOnlySpan<uint> counts)
        {
            CheckLength(counts.Length, sequences.Length, "counts");
            int status;
            PoolLease lease = Enter();
            try
            {
                fixed (Sequence* handles = sequences)
                fixed (uint* numbers = counts)
                {
                    status = NativeMethods.kv_step_accept_batch(
                        slot.Handle, (uint)sequences.Length, (ulong*)handles, numbers);
                }
            }
            finally
            {
                lease.Release();
            }
            pool.Finish(status);
        }

        /// <summary>Ends the step: accepted tokens become part of their sequences, the rest is
        /// rolled back, blocks behind windows return, policies that are due run. When it throws,
        /// the step is cancelled, unless another thread was inside a call.</summary>
        public StepReport End()
        {
            kv_step_report report = default;
            report.struct_size = (uint)sizeof(kv_step_report);
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeMethods.kv_step_end(slot.Handle, &report);
                if (status >= 0 || pool.TakesTurns)
                {
                    slot.Close(number);
                }
                else
                {
                    slot.EndFailed = number;
                }
            }
            finally
            {
                lease.Release();
            }
            pool.Finish(status);
            return new StepReport(report);
        }

        /// <summary>Undoes the step: every sequence is as before it began.</summary>
        public void Cancel()
        {
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeMethods.kv_step_cancel(slot.Handle);
                if (status >= 0)
                {
                    slot.Close(number);
                }
            }
            finally
            {
                lease.Release();
            }
            pool.Finish(status);
        }

        /// <summary>Cancels a step that has not ended; does nothing to one that has, or whose pool
        /// is disposed.</summary>
        public void Dispose()
        {
            if (!IsOpen)
            {
                return;
            }
            try
            {
                Cancel();
            }
            catch (ObjectDisposedException)
            {
                // It was closed, or its pool, perhaps just now.
            }
            catch (KvrtArgumentException) when (slot.EndFailed == number)
            {
                // The End that failed has cancelled it.
            }
        }

        /// <summary>The native pool, for one call on a step that is open.</summary>
        internal PoolLease Enter()
        {
            if (pool == null)
            {
                throw new InvalidOperationException(
                    "The step was never begun: it comes from Pool.BeginStep.");
            }
            PoolLease lease = pool.EnterStep();
            if (slot.Number != number)
            {
                lease.Release();
                throw new ObjectDisposedException(nameof(Step), "The step is closed.");
            }
            return lease;
        }

        private static void CheckLength(int length, int needed, string name)
        {
            if (length != needed)
            {
                throw new KvrtArgumentException(
                    Status.Invalid, $"{name} holds {length} elements, {needed} are needed");
            }
        }

        private static void CheckTokens(ReadOnlySpan<uint> counts, int length)
        {
            ulong total = 0; // less than 2^31 elements of less than 2^32 do not overflow
            foreach (uint count in counts)
            {
                total += count;
            }
            if (total != (ulong)length)
            {
                throw new KvrtArgumentException(
                    Status.Invalid, $"tokenIds holds {length} elements, the counts sum to {total}");
            }
        }
    }
}
