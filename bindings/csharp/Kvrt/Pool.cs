// Pools: creation, disposal, counters, statistics of queries.
using System;
using System.Collections.Generic;
using System.Runtime.CompilerServices;
using System.Runtime.ExceptionServices;
using System.Text;
using Kvrt.Native;

namespace Kvrt
{
    /// <summary>The cache of one model on one device, with all its sequences and steps.</summary>
    /// <remarks>Threads: calls on one pool are made one at a time, by any thread; two at once give
    /// <see cref="Status.Invalid"/>. With <see cref="PoolOptions.ThreadSafe"/> a lock inside orders
    /// them. <see cref="GetStats"/>, <see cref="GetClassStats"/> and <see cref="Dispose"/> are for
    /// any thread at any time, also from inside a hook.</remarks>
    public sealed unsafe partial class Pool : IDisposable
    {
        private readonly PoolHandle handle = new PoolHandle();
        private readonly HookState hooks;
        private readonly List<StepSlot> stepSlots = new List<StepSlot>();
        private readonly object stepTurn; // of a thread-safe pool
        private long stepsBegun;

        /// <summary>Creates a pool: all memory besides the arena is allocated now.</summary>
        public Pool(PoolConfig config, Model model) : this(config, model, null)
        {
        }

        /// <summary>Creates a pool on <see cref="Device.Cuda"/>, without
        /// <see cref="PoolOptions.Elastic"/>, all of whose device memory is the allocator's.
        /// </summary>
        public Pool(PoolConfig config, Model model, CudaAllocator allocator)
            : this(config, model, (CudaAllocator?)allocator)
        {
        }

        private Pool(PoolConfig config, Model model, CudaAllocator? allocator)
        {
            NativeLoader.Load();
            using (var source = new NativeConfiguration(config, model))
            {
                hooks = config.Hooks == null ? null : new HookState(config.Hooks);
                stepTurn = (config.Options & PoolOptions.ThreadSafe) != 0 ? new object() : null;
                OnCuda = config.Device == Device.Cuda;
                Create(source, allocator);
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)] // compiled once the library is there
        private void Create(NativeConfiguration source, CudaAllocator? allocator)
        {
            IntPtr pool = IntPtr.Zero;
            kv_hooks table = hooks == null ? default : hooks.Describe();
            kv_pool_config config = source.Config(hooks == null ? null : &table);
            kv_model model = source.Model;
            HookState.ForgetPending();
            int status;
            if (allocator is CudaAllocator chosen)
            {
                kv_cuda_memory memory = default;
                memory.struct_size = (uint)sizeof(kv_cuda_memory);
                memory.user = (void*)chosen.User;
                memory.allocate = chosen.Allocate;
                memory.release = chosen.Release;
                status = NativeCudaMethods.kv_cuda_pool_create(&config, &model, &memory, &pool);
            }
            else
            {
                status = NativeMethods.kv_pool_create(&config, &model, &pool);
            }
            ExceptionDispatchInfo thrown = HookState.TakePending();
            if (status < 0)
            {
                hooks?.Free();
                KvrtException.Throw(status, thrown?.SourceException);
            }
            handle.Adopt(pool, hooks);
            if (thrown != null)
            {
                handle.Dispose();
                thrown.Throw();
            }
        }

        /// <summary>Closes the pool with all its sequences and steps: their further use is an
        /// ObjectDisposedException. Does not wait: when calls are inside on other threads, the
        /// memory goes when the last of them leaves. Disposing again does nothing.</summary>
        public void Dispose()
        {
            HookState.ForgetPending();
            handle.Dispose();
            if (hooks != null)
            {
                HookState.TakePending()?.Throw();
            }
        }

        /// <summary>What a pool of this configuration needs and holds, without creating it. With
        /// an arena of 0 bytes it says how much memory that takes, and nothing fits.</summary>
        /// <param name="config">The pool's limits.</param>
        /// <param name="model">The pool's model.</param>
        /// <param name="sequences">How many; 0: as many as the pool allows.</param>
        /// <param name="tokensPerSequence">How long each is; 0: as long as the pool allows.</param>
        /// <param name="layer">The one whose share is reported.</param>
        public static PlanReport Plan(
            PoolConfig config, Model model, ulong sequences = 0, ulong tokensPerSequence = 0,
            uint layer = 0)
        {
            NativeLoader.Load();
            using (var source = new NativeConfiguration(config, model))
            {
                return Plan(source, sequences, tokensPerSequence, layer);
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)] // compiled once the library is there
        private static PlanReport Plan(
            NativeConfiguration source, ulong sequences, ulong tokensPerSequence, uint layer)
        {
            kv_pool_config config = source.Config(null);
            kv_model model = source.Model;
            kv_plan_report report = default;
            report.struct_size = (uint)sizeof(kv_plan_report);
            report.sequences = sequences;
            report.tokens_per_sequence = tokensPerSequence;
            report.layer = layer;
            int status = NativeMethods.kv_plan(&config, &model, &report);
            if (status < 0)
            {
                KvrtException.Throw(status, null);
            }
            return new PlanReport(report);
        }

        /// <summary>The counters of one moment.</summary>
        public PoolStats GetStats()
        {
            kv_pool_stats stats = default;
            stats.struct_size = (uint)sizeof(kv_pool_stats);
            int status;
            PoolLease lease = EnterFromAnywhere();
            try
            {
                status = NativeMethods.kv_pool_get_stats(lease.Pool, &stats);
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
            return new PoolStats(stats);
        }

        /// <summary>The counters of one class of blocks; <see cref="PoolStats.Classes"/> says how
        /// many there are.</summary>
        public ClassStats GetClassStats(uint classIndex)
        {
            kv_class_stats stats = default;
            stats.struct_size = (uint)sizeof(kv_class_stats);
            int status;
            PoolLease lease = EnterFromAnywhere();
            try
            {
                status = NativeMethods.kv_pool_get_class_stats(lease.Pool, classIndex, &stats);
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
            return new ClassStats(stats);
        }

        /// <summary>The counters of one layer; one that shares another's cache shows its owner's.
        /// For any thread at any time, as the others.</summary>
        public LayerStats GetLayerStats(uint layer)
        {
            kv_layer_stats stats = default;
            stats.struct_size = (uint)sizeof(kv_layer_stats);
            stats.layer = layer;
            ReadLayerStats(&stats); // without arrays: kv_heads
            var keys = new ulong[stats.kv_heads];
            var values = new ulong[stats.kv_heads];
            stats.head_capacity = stats.kv_heads;
            fixed (ulong* saturatedKeys = keys)
            fixed (ulong* saturatedValues = values)
            {
                stats.saturated_keys = saturatedKeys;
                stats.saturated_values = saturatedValues;
                ReadLayerStats(&stats);
            }
            return new LayerStats(keys, values, stats.recoded_rows, stats.recoding_error);
        }

        private void ReadLayerStats(kv_layer_stats* stats)
        {
            int status;
            PoolLease lease = EnterFromAnywhere();
            try
            {
                status = NativeMethods.kv_pool_get_layer_stats(lease.Pool, stats);
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
        }

        /// <summary>With <see cref="PoolOptions.HostFences"/>: all steps with a fence up to this
        /// one have been read to the end.</summary>
        public void PassFence(ulong fence)
        {
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeMethods.kv_pool_pass_fence(lease.Pool, fence);
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
        }

        /// <summary>Walks everything and throws <see cref="KvrtInternalException"/> when something
        /// is wrong. Slow; for tests and for hunting defects.</summary>
        public void Check()
        {
            int status;
            PoolLease lease = Enter();
            try
            {
                status = NativeMethods.kv_pool_check(lease.Pool);
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
        }

        /// <summary>Gives the pool a layer's statistics; they serve every sequence whose policy
        /// does not say <see cref="PolicyOptions.StatisticsOnline"/>.</summary>
        public void SetStatistics(QueryStatistics statistics)
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
                fixed (float* varianceReal = statistics.VarianceReal)
                fixed (float* varianceImaginary = statistics.VarianceImaginary)
                fixed (float* covariance = statistics.Covariance)
                {
                    kv_query_statistics native = statistics.Describe(
                        real, imaginary, magnitude, varianceReal, varianceImaginary, covariance);
                    status = NativeMethods.kv_pool_set_statistics(lease.Pool, &native);
                }
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
        }

        /// <summary>Sets the statistics of all layers from a file, or of none.</summary>
        public void LoadStatistics(string path)
        {
            int status;
            byte[] terminated = Terminated(path);
            PoolLease lease = Enter();
            try
            {
                fixed (byte* bytes = terminated)
                {
                    status = NativeMethods.kv_pool_load_statistics(lease.Pool, bytes);
                }
            }
            finally
            {
                lease.Release();
            }
            Finish(status);
        }

        /// <summary>The native pool, for the length of one call.</summary>
        internal PoolLease Enter()
        {
            return Enter(null);
        }

        /// <summary>The same for counters, which hooks may read too: the library reads them without
        /// a lock.</summary>
        private PoolLease EnterFromAnywhere()
        {
            CheckOpen();
            HookState.ForgetPending();
            return new PoolLease(handle, null);
        }

        /// <summary>The same for calls on steps, which wait for their turn where the library would
        /// let them wait too.</summary>
        internal PoolLease EnterStep()
        {
            return Enter(stepTurn);
        }

        /// <summary>Whether calls on steps wait for each other.</summary>
        internal bool TakesTurns => stepTurn != null;

        private PoolLease Enter(object turn)
        {
            CheckOpen();
            if (hooks != null)
            {
                HookState.RefuseReentry();
                HookState.ForgetPending();
            }
            return new PoolLease(handle, turn);
        }

        private void CheckOpen()
        {
            if (handle.IsClosed)
            {
                throw new ObjectDisposedException(nameof(Pool), "The pool is closed.");
            }
        }

        /// <summary>Throws what the call returned, or what a hook threw in it. On the thread of the
        /// call, right behind it: the library keeps a thread's last message.</summary>
        internal void Finish(int status)
        {
            ExceptionDispatchInfo thrown = hooks == null ? null : HookState.TakePending();
            if (status < 0)
            {
                KvrtException.Throw(status, thrown?.SourceException);
            }
            thrown?.Throw();
        }

        private static byte[] Terminated(string path)
        {
            if (path == null)
            {
                throw new ArgumentNullException(nameof(path));
            }
            if (path.IndexOf('\0') >= 0)
            {
                throw new KvrtArgumentException(Status.Invalid, "path holds a NUL character");
            }
            return Encoding.UTF8.GetBytes(path + "\0");
        }
    }
}
