// Runs every method marked [Test] and counts them. After each, nothing of the library may be alive.
using System;
using System.IO;
using System.Linq;
using System.Reflection;

namespace Kvrt.Tests
{
    [AttributeUsage(AttributeTargets.Method)]
    internal sealed class TestAttribute : Attribute { }

    internal static class Runner
    {
        /// <summary>Arguments: none, or a part of the names of the tests to run; or --load, for
        /// tests of the loader, which need a process of their own.</summary>
        private static int Main(string[] arguments)
        {
            if (arguments.Length == 1 && arguments[0] == "--load")
            {
                return LoaderTests.LoadInThisProcess();
            }
            string wanted = arguments.Length == 0 ? "" : arguments[0];
            MethodInfo[] tests = Assembly.GetExecutingAssembly().GetTypes()
                .SelectMany(type => type.GetMethods(BindingFlags.Static | BindingFlags.Public))
                .Where(method => method.IsDefined(typeof(TestAttribute), false))
                .Where(method => NameOf(method).Contains(wanted))
                .ToArray();
            int failed = tests.Count(test => !Passes(test));
            Console.WriteLine($"{tests.Length - failed} passed, {failed} failed");
            return failed == 0 && tests.Length != 0 ? 0 : 1;
        }

        /// <summary>The root of the repository.</summary>
        public static string Repository => Path.GetFullPath(Path.Combine(
            Environment.GetEnvironmentVariable("KVRT_GOLDEN_DIR"), "..", "..", ".."));

        private static string NameOf(MethodInfo test) => test.DeclaringType.Name + "." + test.Name;

        private static bool Passes(MethodInfo test)
        {
            try
            {
                test.Invoke(null, null);
                foreach (LiveKind kind in Enum.GetValues(typeof(LiveKind)))
                {
                    Check.Equal(0UL, Library.LiveCount(kind), $"{kind} alive after the test");
                }
                return true;
            }
            catch (Exception error)
            {
                Exception cause = error is TargetInvocationException ? error.InnerException : error;
                Console.WriteLine($"FAILED {NameOf(test)}: {cause}");
                CollectLeaks();
                return false;
            }
        }

        /// <summary>A failure shall not make the tests behind it fail too.</summary>
        private static void CollectLeaks()
        {
            GC.Collect();
            GC.WaitForPendingFinalizers();
        }
    }
}
