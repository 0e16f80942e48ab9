// What a step does per layer: write and attend, or hand its tables to the engine's own kernels.
using System;
using Kvrt.Native;

namespace Kvrt
{
    public readonly unsafe partial struct Step
    {
        /// <summary>Stores keys and values of all rows of the step in a layer, once per layer that
        /// stores. Keys come as attention will use them.</summary>
        /// <param name="layer">The layer.</param>
        /// <param name="keys">[rows, kv_heads, key_dim]</param>
        /// <param name="values">[rows, kv_heads, value_dim]</param>
        public void Write(uint layer, in ReadOnlyTensor keys, in ReadOnlyTensor values)
        {
            CheckDevice(false);
            int status;
            PoolLease lease = Enter();
            try
            {
                fixed (float* keyFloats = keys.Floats)
                fixed (ushort* keyHalves = keys.Halves)
                fixed (float* valueFloats = values.Floats)
                fixed (ushort* valueHalves = values.Halves)
                {
                    kv_tensor nativeKeys = keys.Describe(keyFloats, keyHalves);
                    kv_tensor nativeValues = values.Describe(valueFloats, valueHalves);
                    status = NativeMethods.kv_write(
                        slot.Handle, layer, &nativeKeys, &nativeValues);
                }
            }
            finally
            {
                lease.Release();
            }
            pool.Finish(status);
        }

        /// <summary>results[row, head] = softmax(scale * query . keys) values, over the slots that
        /// the row may see.</summary>
        /// <param name="layer">The layer.</param>
        /// <param name="queries">[rows, query_heads, key_dim]</param>
        /// <param name="results">[rows, query_heads, value_dim]</param>
        /// <param name="logSumExp">[rows, query_heads]: filled with natural logarithms; or empty.
        /// </param>
        /// <param name="options">Switches.</param>
        public void Attend(
            uint layer, in ReadOnlyTensor queries, in Tensor results,
            Span<float> logSumExp = default, AttendOptions options = AttendOptions.None)
        {
            CheckDevice(false);
            if (logSumExp.Length != 0)
            {
                CheckLogSumExp(logSumExp.Length, queries.Layout);
            }
            int status;
            PoolLease lease = Enter();
            try
            {
                fixed (float* queryFloats = queries.Floats)
                fixed (ushort* queryHalves = queries.Halves)
                fixed (float* resultFloats = results.View.Floats)
                fixed (ushort* resultHalves = results.View.Halves)
                fixed (float* logarithms = logSumExp)
                {
                    kv_tensor nativeQueries = queries.Describe(queryFloats, queryHalves);
                    kv_tensor nativeResults = results.View.Describe(resultFloats, resultHalves);
                    kv_attend_options nativeOptions = default;
                    nativeOptions.struct_size = (uint)sizeof(kv_attend_options);
                    nativeOptions.flags = (uint)options;
                    nativeOptions.log_sum_exp = logarithms;
                    status = NativeMethods.kv_attend(
                        slot.Handle, layer, &nativeQueries, &nativeResults, &nativeOptions);
                }
            }
            finally
            {
                lease.Release();
            }
            pool.Finish(status);
        }

        /// <summary>Fills the caller's buffers with one layer's tables, for its own kernels. The
        /// layer counts as written. With <see cref="Layer.LanePerHead"/> tables are about one KV
        /// head, and all of them have to be exported for that; else kvHead is 0.</summary>
        public ExportedTables Export(uint layer, in TableBuffers buffers, uint kvHead = 0)
        {
            pool.Finish(Export(layer, kvHead, buffers, out ExportedTables tables));
            return tables;
        }

        /// <summary>Fills the caller's buffers with one layer's tables. False: one is too small
        /// (<see cref="Status.Limit"/>), the sizes needed are in tables, and nothing else was
        /// written.</summary>
        public bool TryExport(
            uint layer, in TableBuffers buffers, out ExportedTables tables, uint kvHead = 0)
        {
            int status = Export(layer, kvHead, buffers, out tables);
            pool.Finish(status == NativeConstants.KV_LIMIT ? NativeConstants.KV_OK : status);
            return status != NativeConstants.KV_LIMIT;
        }

        private int Export(
            uint layer, uint kvHead, in TableBuffers buffers, out ExportedTables tables)
        {
            kv_tables native = buffers.Describe();
            native.kv_head = kvHead;
            int status;
            PoolLease lease = Enter();
            try
            {
                fixed (int* blockTable = buffers.BlockTable)
                fixed (int* indptr = buffers.Indptr)
                fixed (int* indices = buffers.Indices)
                fixed (int* lastPageLen = buffers.LastPageLen)
                fixed (long* slotMapping = buffers.SlotMapping)
                fixed (int* queryStart = buffers.QueryStart)
                fixed (int* kvLen = buffers.KvLen)
                fixed (int* positions = buffers.Positions)
                fixed (int* slotPositions = buffers.SlotPositions)
                fixed (int* slotIndptr = buffers.SlotIndptr)
                fixed (int* sealedBlocks = buffers.SealedBlocks)
                {
                    native.block_table = blockTable;
                    native.indptr = indptr;
                    native.indices = indices;
                    native.last_page_len = lastPageLen;
                    native.slot_mapping = slotMapping;
                    native.query_start = queryStart;
                    native.kv_len = kvLen;
                    native.positions = positions;
                    native.slot_positions = slotPositions;
                    native.slot_indptr = slotIndptr;
                    native.sealed_blocks = sealedBlocks;
                    status = NativeMethods.kv_step_export(slot.Handle, layer, &native);
                }
            }
            finally
            {
                lease.Release();
            }
            tables = new ExportedTables(native);
            return status;
        }

        private static void CheckLogSumExp(int length, in TensorLayout queries)
        {
            ulong needed = (ulong)queries.Rows * queries.Heads;
            if ((ulong)length != needed)
            {
                throw new KvrtArgumentException(Status.Invalid,
                    $"logSumExp holds {length} elements, [{queries.Rows}, {queries.Heads}] needs " +
                    needed);
            }
        }
    }

    /// <summary>The caller's buffers for Step.Export; an empty one is not wanted.
    /// </summary>
    public ref struct TableBuffers
    {
        /// <summary>[items, <see cref="BlockTableStride"/>]; unused entries become -1.</summary>
        public Span<int> BlockTable { get; set; }

        /// <summary>Elements of a row of <see cref="BlockTable"/>.</summary>
        public ulong BlockTableStride { get; set; }

        /// <summary>[items + 1]: where each item's <see cref="Indices"/> begin.</summary>
        public Span<int> Indptr { get; set; }

        /// <summary>Block ids of all items.</summary>
        public Span<int> Indices { get; set; }

        /// <summary>[items]: slots used of the last block.</summary>
        public Span<int> LastPageLen { get; set; }

        /// <summary>[tokens]: block id * block tokens + slot, where each new token goes.</summary>
        public Span<long> SlotMapping { get; set; }

        /// <summary>[items + 1]: where each item's rows begin.</summary>
        public Span<int> QueryStart { get; set; }

        /// <summary>[items]: retained slots, this step's tokens included.</summary>
        public Span<int> KvLen { get; set; }

        /// <summary>[tokens]: of the new tokens.</summary>
        public Span<int> Positions { get; set; }

        /// <summary>[kv_heads, slots of all items]: of every slot; of one KV head with
        /// <see cref="Layer.LanePerHead"/>.</summary>
        public Span<int> SlotPositions { get; set; }

        /// <summary>[items + 1]: sums of <see cref="KvLen"/>.</summary>
        public Span<int> SlotIndptr { get; set; }

        /// <summary>[items]: how many of an item's first blocks are sealed.</summary>
        public Span<int> SealedBlocks { get; set; }

        /// <summary>The capacities: of buffers that share one, the smallest that is
        /// wanted.</summary>
        internal kv_tables Describe()
        {
            int items = Smallest(Smallest(int.MaxValue, LastPageLen.Length), KvLen.Length);
            items = Smallest(items, SealedBlocks.Length);
            int bounds = Smallest(Smallest(int.MaxValue, Indptr.Length), QueryStart.Length);
            bounds = Smallest(bounds, SlotIndptr.Length);
            kv_tables tables = default;
            unsafe
            {
                tables.struct_size = (uint)sizeof(kv_tables);
            }
            tables.block_table_stride = BlockTableStride;
            tables.block_table_capacity = (ulong)BlockTable.Length;
            tables.indices_capacity = (ulong)Indices.Length;
            tables.item_capacity = (ulong)Math.Min(items, bounds - 1);
            tables.token_capacity = (ulong)Smallest(
                Smallest(int.MaxValue, SlotMapping.Length), Positions.Length);
            tables.slot_positions_capacity = (ulong)SlotPositions.Length;
            return tables;
        }

        private static int Smallest(int smallest, int length)
        {
            return length == 0 ? smallest : Math.Min(smallest, length);
        }
    }
}
