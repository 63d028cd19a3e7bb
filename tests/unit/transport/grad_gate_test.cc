#include <gtest/gtest.h>

#include "server/transport/row_exchange.h"

namespace headwater::transport {
namespace {

TEST(GradGate, KeepsRowsUntilAllHaveCome) {
  GradGate gate;
  EXPECT_EQ(gate.Ready(4), 0);
  EXPECT_EQ(gate.Open(), 4);
  EXPECT_EQ(gate.Ready(7), 7);
  EXPECT_EQ(gate.Open(), 7);
}

TEST(GradGate, OpensBeforeTheFirstRowAndNeverTakesRowsBack) {
  GradGate gate;
  EXPECT_EQ(gate.Open(), 0);
  EXPECT_EQ(gate.Ready(5), 5);
  EXPECT_EQ(gate.Ready(2), 5);
}

TEST(GradGate, LetsNothingOutOfAComputationThatWasGivenUp) {
  GradGate gate;
  EXPECT_EQ(gate.Ready(4), 0);
  EXPECT_FALSE(gate.is_shut());
  EXPECT_TRUE(gate.Shut());
  EXPECT_TRUE(gate.is_shut());
  EXPECT_TRUE(gate.Shut());
  EXPECT_EQ(gate.Open(), 0);
  EXPECT_EQ(gate.Ready(8), 0);
}

TEST(GradGate, IsNotShutOnceRowsMayHaveLeft) {
  GradGate gate;
  gate.Open();
  EXPECT_FALSE(gate.Shut());
  EXPECT_FALSE(gate.is_shut());
  EXPECT_EQ(gate.Ready(1), 1);
}

}  // namespace
}  // namespace headwater::transport
